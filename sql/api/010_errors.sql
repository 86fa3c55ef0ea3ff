-- Every error of the product leaves through here: SQLSTATE, message, values, and what to do next.
create or replace function pycontext._raise(state text, message text, detail text, hint text)
returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = state, message = message, detail = detail, hint = hint;
end
$$;

create or replace function pycontext._no_such_chat(chat_id text)
returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pycontext._raise('PCX01', 'no such chat', format('chat_id is %L', chat_id),
        'create it first: select pycontext.create_chat(…), or register the table it lives in');
end
$$;
