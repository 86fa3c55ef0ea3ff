-- The window as request messages. These functions, not the window, add what a provider's form asks for:
-- a fixed (continue) where the last row is an assistant's, and the memory block right before the newest request.

create or replace function pycontext._fenced(tag text, body text)
returns text
language sql immutable parallel safe
as $$
    select format(E'<%s>\n%s\n</%s>', tag, pycontext._escape_fences(body), tag)
$$;

-- Content as chat completions take it: no reasoning parts; for a tool result text alone, its images told in words.
create or replace function pycontext._openai_content(content jsonb, role text, has_calls boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = ''
as $$
begin
    if jsonb_typeof(content) is distinct from 'array' then
        return content;
    end if;
    select jsonb_agg(case when role = 'tool' and pycontext._part_kind(e.value) = 'image'
            then '{"type": "text", "text": "[image: in the message after the results]"}'::jsonb else e.value end
            order by e.ordinality)
    into content
    from jsonb_array_elements(content) with ordinality e
    where pycontext._part_kind(e.value) <> 'reasoning';
    return coalesce(content, case when has_calls then null else '"(empty)"'::jsonb end);
end
$$;

-- Rows of a window as OpenAI chat completions.
create or replace function pycontext._openai_of(rows pycontext.window_row[], memory text, strict_roles boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = ''
as $$
declare
    v_messages jsonb;
    v_last text := rows[cardinality(rows)].role;
    v_request integer := (
        select max(w.ordinal) from unnest(rows) w where w.role = 'user' and w.kind = 'message' and w.section <> 'omitted');
begin
    select jsonb_agg(m.message order by m.ordinal, m.n)
    into v_messages
    from (
        select w.ordinal, 1 as n,
            case when w.role in ('system', 'developer') and w.section <> 'system' and strict_roles then
                jsonb_build_object('role', 'user', 'content',
                    pycontext._fenced('system-note', pycontext._content_text(w.content)))
            else jsonb_strip_nulls(jsonb_build_object('role', w.role, 'tool_calls',
                    case when w.tool_calls @? '$[*] ? (!exists (@.type))' then (
                        select jsonb_agg('{"type": "function"}'::jsonb || c.value order by c.ordinality)
                        from jsonb_array_elements(w.tool_calls) with ordinality c)
                    else w.tool_calls end, 'tool_call_id', w.tool_call_id, 'name', w.name))
                || jsonb_build_object('content', pycontext._openai_content(w.content, w.role, w.tool_calls is not null))
            end as message
        from unnest(rows) w
        union all
        -- the images of results follow the last result of their run as a message of their own
        select (select coalesce(min(x.ordinal) - 1, cardinality(rows)) from unnest(rows) x
                where x.ordinal > w.ordinal and x.role <> 'tool'), 2 + w.ordinal,
            jsonb_build_object('role', 'user', 'content', (
                select jsonb_agg(e.value order by e.ordinality)
                from jsonb_array_elements(w.content) with ordinality e where pycontext._part_kind(e.value) = 'image'))
        from unnest(rows) w
        where w.role = 'tool' and jsonb_typeof(w.content) = 'array'
            and exists (select from jsonb_array_elements(w.content) e where pycontext._part_kind(e.value) = 'image')
        union all
        select v_request, 0, jsonb_build_object('role', 'user', 'content', pycontext._fenced('memory-context', memory))
        where memory ~ '\S') m;
    v_messages := coalesce(v_messages, '[]');
    if v_last is null or v_last not in ('user', 'tool') then
        v_messages := v_messages || '[{"role": "user", "content": "(continue)"}]'::jsonb;
    end if;
    return v_messages;
end
$$;

create or replace function pycontext._window_array(chat_id text, token_budget integer, as_of text)
returns pycontext.window_row[]
language sql stable
as $$
    select coalesce(array_agg(w order by w.ordinal), '{}') from pycontext.working_window(chat_id, token_budget, as_of) w
$$;

create or replace function pycontext._strict_roles(chat_id text)
returns boolean
language sql stable
as $$
    select p.strict_roles from pycontext.chat c join pycontext.profile p on p.profile = c.profile
    where c.chat_id = _strict_roles.chat_id
$$;

-- OpenAI chat completions. memory: text of recalled memory, fenced here, never stored.
create or replace function pycontext.openai_messages(
    chat_id text, token_budget integer default null, as_of text default null, memory text default null)
returns jsonb
language sql stable
set search_path = ''
as $$
    select pycontext._openai_of(pycontext._window_array(chat_id, token_budget, as_of), memory, pycontext._strict_roles(chat_id))
$$;

-- Content blocks of one message for Anthropic: text, images, reasoning kept whole.
create or replace function pycontext._anthropic_blocks(content jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select case jsonb_typeof(content)
        when 'string' then jsonb_build_array(jsonb_build_object('type', 'text', 'text', content #>> '{}'))
        when 'array' then (
            select jsonb_agg(case
                when pycontext._part_kind(e.value) = 'text' then
                    jsonb_build_object('type', 'text', 'text', pycontext._part_text(e.value))
                when e.value ->> 'type' in ('image_url', 'input_image') then
                    case when u.url like 'data:%' then jsonb_build_object('type', 'image', 'source', jsonb_build_object(
                        'type', 'base64', 'media_type', substring(u.url from '^data:([^;,]+)'),
                        'data', substring(u.url from ',(.*)$')))
                    else jsonb_build_object('type', 'image', 'source', jsonb_build_object('type', 'url', 'url', u.url)) end
                when pycontext._part_kind(e.value) in ('image', 'reasoning') then e.value
                else jsonb_build_object('type', 'text', 'text', e.value::text)
            end order by e.ordinality)
            from jsonb_array_elements(content) with ordinality e
            cross join lateral (select coalesce(e.value #>> '{image_url,url}', e.value ->> 'image_url') as url) u)
        else '[]'
    end
$$;

-- A call's input must be an object for Anthropic; what does not parse is passed whole under one key.
create or replace function pycontext._call_input(arguments text)
returns jsonb
language plpgsql immutable parallel safe
set search_path = ''
as $$
begin
    if jsonb_typeof(arguments::jsonb) = 'object' then
        return arguments::jsonb;
    end if;
    return jsonb_build_object('arguments', arguments);
exception when others then
    return jsonb_build_object('arguments', arguments);
end
$$;

-- Anthropic messages: {"system": text, "messages": […]}; adjacent rows of one side are joined as separate blocks.
create or replace function pycontext._anthropic_of(rows pycontext.window_row[], memory text)
returns jsonb
language plpgsql immutable parallel safe
set search_path = ''
as $$
declare
    v_system text;
    v_messages jsonb;
    v_blocks jsonb;
    v_role text;
    v_memory jsonb;
    v_ids jsonb := '{}';
    v_used jsonb := '{}';
    w record;
begin
    v_messages := '[]';
    v_blocks := '[]';
    v_memory := case when memory ~ '\S' then jsonb_build_array(jsonb_build_object('type', 'text',
        'text', pycontext._fenced('memory-context', memory))) else '[]'::jsonb end;
    for w in
        select t.*, case when t.role = 'assistant' then 'assistant' else 'user' end as side,
            t.ordinal = max(t.ordinal) filter (where t.role = 'user' and t.kind = 'message' and t.section <> 'omitted')
                over () as is_request
        from unnest(rows) t
        order by t.ordinal
    loop
        if w.section = 'system' then
            v_system := w.content #>> '{}';
            continue;
        end if;
        if v_role is null and w.side = 'assistant' then
            v_role := 'user';
            v_blocks := '[{"type": "text", "text": "(continue)"}]';
        end if;
        if w.side is distinct from v_role then
            if v_role is not null then
                v_messages := v_messages || jsonb_build_object('role', v_role, 'content', v_blocks);
            end if;
            v_role := w.side;
            v_blocks := '[]';
        end if;
        if w.is_request then
            v_blocks := v_blocks || v_memory;
            v_memory := '[]';
        end if;
        v_blocks := v_blocks || case
            when w.role = 'tool' then jsonb_build_array(jsonb_build_object('type', 'tool_result',
                'tool_use_id', coalesce(v_ids ->> w.tool_call_id, w.tool_call_id), 'content', pycontext._anthropic_blocks(w.content)))
            when w.role in ('system', 'developer') then jsonb_build_array(jsonb_build_object('type', 'text',
                'text', pycontext._fenced('system-note', pycontext._content_text(w.content))))
            else pycontext._anthropic_blocks(w.content)
        end;
        if w.tool_calls is not null then
            -- ids must be of one alphabet and unique in the request: a later use takes the place of its call along
            select jsonb_object_agg(e.value ->> 'id', case when v_used ? c.id then left(c.id, 40) || '_' || w.seq else c.id end)
            into v_ids
            from jsonb_array_elements(w.tool_calls) e
            cross join lateral (select regexp_replace(e.value ->> 'id', '[^a-zA-Z0-9_-]', '_', 'g') as id) c;
            v_used := v_used || (select jsonb_object_agg(d.value, true) from jsonb_each_text(v_ids) d);
            v_blocks := v_blocks || (
                select jsonb_agg(jsonb_build_object('type', 'tool_use', 'id', v_ids ->> (e.value ->> 'id'),
                    'name', left(regexp_replace(e.value #>> '{function,name}', '[^a-zA-Z0-9_-]', '_', 'g'), 128),
                    'input', pycontext._call_input(e.value #>> '{function,arguments}')) order by e.ordinality)
                from jsonb_array_elements(w.tool_calls) with ordinality e);
        end if;
    end loop;
    if v_role is not null then
        v_messages := v_messages || jsonb_build_object('role', v_role, 'content', v_blocks);
    end if;
    if v_role is distinct from 'user' or v_memory <> '[]' then
        v_messages := v_messages || jsonb_build_object('role', 'user', 'content',
            v_memory || '[{"type": "text", "text": "(continue)"}]'::jsonb);
    end if;
    return jsonb_strip_nulls(jsonb_build_object('system', v_system)) || jsonb_build_object('messages', v_messages);
end
$$;

create or replace function pycontext.anthropic_messages(
    chat_id text, token_budget integer default null, as_of text default null, memory text default null)
returns jsonb
language sql stable
set search_path = ''
as $$
    select pycontext._anthropic_of(pycontext._window_array(chat_id, token_budget, as_of), memory)
$$;

-- The conversation as a person scrolls it: the newest max_rows rows before before_seq by seq, oldest first, lines
-- included.
create or replace function pycontext.thread(
    chat_id text, before_seq bigint default null, max_rows integer default 50)
returns setof pycontext.thread_row
language plpgsql stable
set search_path = ''
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
declare
    v_source text;
    v_to bigint := coalesce(before_seq - 1, 4611686018427387904);
begin
    select c.source into v_source from pycontext.chat c where c.chat_id = thread.chat_id;
    if not found then
        select d.source into v_source from pycontext.source d where d.is_default;
        if not found then
            perform pycontext._no_such_chat(chat_id);
        end if;
    end if;
    return query
    with rows as materialized (
        select r.* from pycontext._thread_rows(thread.chat_id, v_source, array[pycontext._origin(v_source)], array[v_to], null,
            max_rows, true) r
    )
    select t.seq, t.message_id, t.kind, t.origin, t.role, t.content, t.tool_calls, t.tool_call_id, t.name, t.tokens,
        t.encoding is null, t.created_at, t.metadata, t.summary
    from (
        select u.* from (
            select * from rows
            union all
            select * from pycontext._lines(thread.chat_id, (select min(r.seq) from rows r), v_to)) u
        order by u.seq desc, u.line_no desc limit max_rows) t
    order by t.seq, t.line_no;
end
$$;

-- The live summary rows of a chat between two places.
create or replace function pycontext._lines(chat_id text, from_seq bigint, to_seq bigint)
returns setof pycontext._thread_row
language sql stable
as $$
    select 0, m.* from pycontext._stored_row m
    where m.chat_id = _lines.chat_id and m.line_no > 0 and m.gone_act is null and m.seq between from_seq and to_seq
$$;
