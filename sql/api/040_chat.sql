-- Tokens that the returned rows may take: window less reserve, tools and memory, in the encoding's own tokens.
-- Reserve and memory are capped at a quarter and an eighth of the window, so that small windows stay usable.
create or replace function pycontext._budget(p pycontext.profile, tool_tokens integer, token_scale numeric)
returns integer
language sql immutable parallel safe
as $$
    select floor((p.context_window - least(p.response_reserve, p.context_window / 4)
        - least(p.memory_tokens, p.context_window / 8) - tool_tokens) / token_scale)::integer
$$;

-- The tenant a new row belongs to: the one given, else the session's (set for row-level security), else ''.
create or replace function pycontext._tenant(tenant text)
returns text
language sql stable parallel safe
as $$
    select coalesce(tenant, current_setting('pycontext.tenant', true), '')
$$;

-- Where a new chat's edit_no begins. From the clock: a chat made again under an old id refuses summaries of the old one.
create or replace function pycontext._first_edit_no()
returns bigint
language sql volatile parallel safe
as $$
    select (extract(epoch from clock_timestamp()) * 1000000)::bigint
$$;

-- Where a chat's messages live: null = here. A chat without a row of its own is of the default source; PCX01 where there is none.
create or replace function pycontext._source_of(chat_id text)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_source text;
begin
    select c.source into v_source from pycontext.chat c where c.chat_id = _source_of.chat_id;
    if not found then
        select d.source into v_source from pycontext.source d where d.is_default;
        if not found then
            perform pycontext._no_such_chat(chat_id);
        end if;
    end if;
    return v_source;
end
$$;

-- Locks the chat's row; PCX01 where there is none, PCX09 where the product's own table holds its messages.
create or replace function pycontext._lock_chat(chat_id text, is_append boolean)
returns pycontext.chat
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
begin
    select t.* into c from pycontext.chat t where t.chat_id = _lock_chat.chat_id for update;
    if not found then
        if not exists (select from pycontext.source s where s.is_default) then
            perform pycontext._no_such_chat(chat_id);
        end if;
        if not is_append then
            -- an adopted chat gets its row with the first thing derived from it
            perform pycontext._chat_bounds(chat_id);
            insert into pycontext.chat (chat_id, tenant, profile, source, token_scale)
            select _lock_chat.chat_id, pycontext._tenant(null), p.profile, s.source, p.token_scale
            from pycontext.source s cross join pycontext.profile p
            where s.is_default and p.profile = 'default'
            on conflict on constraint chat_pk do nothing;
            select t.* into c from pycontext.chat t where t.chat_id = _lock_chat.chat_id for update;
            if not found then
                perform pycontext._raise('PCX10', 'no right to this tenant',
                    format('chat_id %L belongs to another tenant', chat_id), 'use another chat id');
            end if;
        end if;
    end if;
    if is_append and (c.chat_id is null or c.source is not null) then
        perform pycontext._raise('PCX09', 'this chat lives in your own table',
            format('chat_id is %L, source is %L', chat_id, coalesce(c.source,
                (select s.source from pycontext.source s where s.is_default))),
            'insert the message there, then start_turn(chat_id) without a message'
                || case when c.chat_id is null then '; for a chat that is not in your table: create_chat first' else '' end);
    end if;
    return c;
end
$$;

-- Get-or-create: safe on every turn and from two tabs. An existing chat keeps its profile, owner and prompt.
create or replace function pycontext.create_chat(
    chat_id text, system_prompt text default null, profile text default null, tenant text default null,
    owner text default null, source text default null, metadata jsonb default null)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    p pycontext.profile;
    v_rows bigint;
    v_tokens integer;
begin
    if coalesce(chat_id, '') = '' then
        perform pycontext._raise('PCX02', 'a chat needs an id', format('chat_id is %L', chat_id),
            'pass what your product calls the conversation, as text');
    end if;
    if exists (select from pycontext.chat t where t.chat_id = create_chat.chat_id) then
        return chat_id;
    end if;
    if tenant <> current_setting('pycontext.tenant', true) and row_security_active('pycontext.chat') then
        perform pycontext._raise('PCX10', 'no right to this tenant', format('tenant is %L', tenant),
            'set pycontext.tenant to it, or leave it out');
    end if;
    select t.* into p from pycontext.profile t where t.profile = coalesce(create_chat.profile, 'default');
    if not found then
        perform pycontext._raise('PCX06', 'no such profile', format('profile is %L', profile),
            'see: select profile from pycontext.profile');
    end if;
    if source is not null and not exists (select from pycontext.source s where s.source = create_chat.source) then
        perform pycontext._raise('PCX12', 'no such source', format('source is %L', source),
            'register it first: select pycontext.register_source(name, relation)');
    end if;
    insert into pycontext.chat (chat_id, tenant, owner, profile, source, token_scale, edit_no, metadata)
    values (chat_id, pycontext._tenant(tenant), owner, p.profile, source, p.token_scale, pycontext._first_edit_no(), metadata)
    on conflict on constraint chat_pk do nothing;
    get diagnostics v_rows = row_count;
    if v_rows = 0 and not exists (select from pycontext.chat t where t.chat_id = create_chat.chat_id) then
        perform pycontext._raise('PCX10', 'no right to this tenant', format('chat_id %L belongs to another tenant', chat_id),
            'use another chat id');
    end if;
    if v_rows = 1 and pycontext._has_text(system_prompt) then
        v_tokens := 4 + pycontext.estimate_tokens(system_prompt);
        insert into pycontext.prompt (chat_id, act_no, tenant, content, tokens, frozen_tokens)
        values (chat_id, 0, pycontext._tenant(tenant), system_prompt, v_tokens, v_tokens);
    end if;
    return chat_id;
end
$$;

-- The columns that a relation lacks, of those every source has and of others that it was registered with.
create or replace function pycontext._missing_columns(relation regclass, others text[])
returns setof text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select w.name
    from unnest(array['chat_id', 'seq', 'message_id', 'role', 'content', 'created_at'] || others) w (name)
    where not exists (
        select from pg_catalog.pg_attribute a
        where a.attrelid = relation and a.attname = w.name and not a.attisdropped and a.attnum > 0)
$$;

comment on function pycontext._missing_columns(regclass, text[]) is
    'Private. The columns of a source that a relation lacks.';

-- A relation of the product (normally a view) as the home of chats. What it must offer is checked here. It runs with
-- the caller's rights: acts read the relation as the installing role, so whoever owns it is trusted like that role.
create or replace function pycontext.register_source(name text, relation regclass, is_default boolean default false)
returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_missing text := (select string_agg(m.name, ', ') from pycontext._missing_columns(relation, '{}') m (name));
    v_default text;
    v_was pycontext.source;
    v_detail text;
begin
    if v_missing is not null then
        perform pycontext._raise('PCX12', 'the relation lacks columns of a source',
            format('%s has no %s', relation, v_missing),
            'make a view with chat_id, seq, message_id, role, content, created_at');
    end if;
    if not exists (
        select from pg_catalog.pg_attribute a
        where a.attrelid = relation and a.attname = 'seq'
            and a.atttypid in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype)) then
        perform pycontext._raise('PCX12', 'seq must be an integer', format('%s', relation),
            'give the view a growing bigint as seq: an identity column, or an ordering column of its own');
    end if;
    select format('order_at of %s is %s', relation, a.atttypid::regtype) into v_detail
    from pg_catalog.pg_attribute a
    join pg_catalog.pg_type t on t.oid = a.atttypid
    where a.attrelid = relation and a.attname = 'order_at' and coalesce(nullif(t.typbasetype, 0), t.oid)
        not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype);
    if found then
        perform pycontext._raise('PCX12', 'order_at must be a time', v_detail,
            'make a timestamptz, timestamp or date of it in the view, such as to_timestamp(order_at / 1000.0) of milliseconds, '
            'and index that; or leave it out, where seq itself is a column with an index');
    end if;
    if exists (
        select from pg_catalog.pg_class k
        where k.oid = relation and (k.relpersistence = 't' or not pg_has_role(current_user, k.relowner, 'USAGE'))) then
        perform pycontext._raise('PCX12', 'a source must be a lasting relation of a role that you are a member of',
            format('%s', relation), 'create the view as its owner, then register it');
    end if;
    select s.* into v_was from pycontext.source s where s.source = register_source.name for update;
    insert into pycontext.source (source, tenant, relation, is_default)
    select register_source.name, pycontext._tenant(null), quote_ident(n.nspname) || '.' || quote_ident(k.relname), register_source.is_default
    from pg_catalog.pg_class k
    join pg_catalog.pg_namespace n on n.oid = k.relnamespace
    where k.oid = register_source.relation
    on conflict on constraint source_pk do update
    set relation = excluded.relation, is_default = excluded.is_default;
    perform pycontext._learn_source(name);
    perform pycontext._compile_sources();
    perform pycontext._recheck_source(v_was);
    if is_default then
        update pycontext.source s set is_default = false
        where s.source <> register_source.name and s.is_default
        returning s.source into v_default;
        if found then
            raise warning '% is no longer the default: chats of it without a row of their own are read from % now', v_default, name;
        end if;
    end if;
    return name;
end
$$;
