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

-- What to do depends on where chats live: create_chat makes one of our own, for ever, of an id that a product's table was to have.
create or replace function pycontext._no_such_chat(chat_id text)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source;
begin
    select s.* into f from pycontext.source s order by s.is_default desc, s.source limit 1;
    perform pycontext._raise('PCX01', 'no such chat',
        format('chat_id is %L', chat_id) || case when f.is_default then format(', source is %L', f.source) else '' end,
        case when f.is_default then format('%s has no row of it: insert its first message there', f.relation)
            when f.source is not null then format('if it is in %s: select pycontext.create_chat(%L, source => %L); else without a source',
                f.relation, chat_id, f.source)
            else 'create it first: select pycontext.create_chat(…), or register the table it lives in' end);
end
$$;
