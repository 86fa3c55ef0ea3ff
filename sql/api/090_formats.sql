-- The window as request messages. These functions, not the window, add what a provider's form asks for:
-- a fixed (continue) where the last row is an assistant's, and the memory block right before the newest request.

create or replace function pycontext._fenced(tag text, body text)
returns text
language sql immutable parallel safe
as $$
    select format(E'<%s>\n%s\n</%s>', tag, pycontext._escape_fences(body), tag)
$$;

-- Where an image is, as a URL: whichever provider's part it came in, or a tool's by the Model Context Protocol. Null for a file that
-- only one provider has, where there is none, and for what providers do not take: it would have every later request refused.
create or replace function pycontext._image_url(part jsonb)
returns text
language sql immutable parallel safe
as $$
    select case when u.url ~* '^https?://\S+$' then u.url
        when d.type is not null then format('data:image/%s;base64,%s', replace(lower(d.type), 'jpg', 'jpeg'),
            replace(replace(replace(substr(u.url, strpos(u.url, ',') + 1), E'\n', ''), E'\r', ''), ' ', '')) end
    from (
        select btrim(coalesce(pycontext._string(part #> '{image_url,url}'), pycontext._string(part -> 'image_url'),
            case part #>> '{source,type}' when 'url' then pycontext._string(part #> '{source,url}') end,
            'data:' || (part #>> '{source,media_type}') || ';base64,' || pycontext._string(part #> '{source,data}'),
            'data:' || (part ->> 'mimeType') || ';base64,' || pycontext._string(part -> 'data')), E' \t\r\n') as url) u
    cross join lateral (
        select substring(left(u.url, 200) from '(?i)^data:image/(png|jpe?g|gif|webp)(?:;[^,]*)?;base64,.') as type) d
$$;

-- How closely an image is to be looked at; null where a part does not say so.
create or replace function pycontext._image_detail(part jsonb)
returns text
language sql immutable parallel safe
as $$
    select d.detail from (select coalesce(part #>> '{image_url,detail}', part ->> 'detail') as detail) d
    where d.detail in ('auto', 'low', 'high', 'original')
$$;

-- One part as chat completions take it from that role; another provider's part in its own form.
create or replace function pycontext._openai_part(part jsonb, role text)
returns jsonb
language sql immutable parallel safe
as $$
    select case k.kind
        when 'text' then case when part ->> 'type' = 'text' and jsonb_typeof(part -> 'text') = 'string' then part
            else jsonb_build_object('type', 'text', 'text', pycontext._part_text(part)) end
        when 'image' then case
            when role = 'tool' then '{"type": "text", "text": "[image: in the message after the results]"}'
            when role <> 'user' or pycontext._image_url(part) is null then '{"type": "text", "text": "[image]"}'
            else case when part ->> 'type' = 'image_url' then part else '{"type": "image_url"}' end
                || jsonb_build_object('image_url', jsonb_strip_nulls(jsonb_build_object(
                    'url', pycontext._image_url(part), 'detail', pycontext._image_detail(part)))) end
        else case
            when part ->> 'type' in ('input_audio', 'file') and role = 'user' and jsonb_typeof(part -> (part ->> 'type')) = 'object'
                or part ->> 'type' = 'refusal' and role = 'assistant' and pycontext._string(part -> 'refusal') is not null then part
            else jsonb_build_object('type', 'text', 'text', pycontext._part_json(part)) end
    end
    from (select pycontext._part_kind(part) as kind) k
$$;

-- Content as chat completions take it: no reasoning parts; for a tool result text alone, its images told in words.
create or replace function pycontext._openai_content(content jsonb, role text, has_calls boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    if jsonb_typeof(content) is distinct from 'array' then
        return content;
    end if;
    select jsonb_agg(pycontext._openai_part(e.value, role) order by e.ordinality)
    into content
    from jsonb_array_elements(content) with ordinality e
    where pycontext._part_kind(e.value) <> 'reasoning';
    return coalesce(content, case when has_calls then null else '"(empty)"'::jsonb end);
end
$$;

-- A call's id as chat completions take it: of at most 40 characters. The same for a call and its result, which stand together.
create or replace function pycontext._openai_id(id text)
returns text
language sql immutable parallel safe
as $$
    select case when length(id) > 40 then left(id, 7) || '_' || left(encode(sha256(convert_to(id, 'UTF8')), 'hex'), 32) else id end
$$;

-- Calls as chat completions take them, without the place a stream gave them. Those of the Responses API's own tools are told as
-- functions' of that name. A name that no tool can have (models invent some) is made one that providers take back.
create or replace function pycontext._openai_calls(tool_calls jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select case when tool_calls @? '$[*] ? (!(@.type == "function") || exists (@.item) || exists (@.use) || exists (@.index)
            || !(@.function.name like_regex "^[a-zA-Z0-9_.-]{1,128}$") || @.id like_regex ".{41}" flag "s")' then (
        select jsonb_agg(case when c.value ->> 'type' = 'custom'
            then jsonb_build_object('id', n.id, 'type', 'custom', 'custom', jsonb_build_object(
                'name', n.name, 'input', c.value #> '{function,arguments}'))
            else jsonb_set(c.value - '{item,use,index}'::text[] || jsonb_build_object('id', n.id, 'type', 'function'),
                '{function,name}', to_jsonb(n.name)) end
            order by c.ordinality)
        from jsonb_array_elements(tool_calls) with ordinality c
        cross join lateral (
            select left(regexp_replace(c.value #>> '{function,name}', '[^a-zA-Z0-9_.-]', '_', 'g'), 128) as name,
                pycontext._openai_id(c.value ->> 'id') as id) n)
    else tool_calls end
$$;

-- Rows of a window as OpenAI chat completions.
create or replace function pycontext._openai_of(rows pycontext.window_row[], memory text, strict_roles boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
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
            else jsonb_strip_nulls(jsonb_build_object('role', w.role, 'tool_calls', pycontext._openai_calls(w.tool_calls),
                    'tool_call_id', pycontext._openai_id(w.tool_call_id),
                    'name', nullif(left(regexp_replace(w.name, '[\s<|\\/>]+', '_', 'g'), 64), '')))
                || jsonb_build_object('content', pycontext._openai_content(w.content, w.role, w.tool_calls is not null))
            end as message
        from unnest(rows) w
        union all
        -- the images of results follow the last result of their run as a message of their own
        select (select coalesce(min(x.ordinal) - 1, cardinality(rows)) from unnest(rows) x
                where x.ordinal > w.ordinal and x.role <> 'tool'), 2 + w.ordinal,
            jsonb_build_object('role', 'user', 'content', (
                select jsonb_agg(pycontext._openai_part(e.value, 'user') order by e.ordinality)
                from jsonb_array_elements(w.content) with ordinality e where pycontext._part_kind(e.value) = 'image'))
        from unnest(rows) w
        where w.role = 'tool' and jsonb_typeof(w.content) = 'array'
            and exists (select from jsonb_array_elements(w.content) e where pycontext._part_kind(e.value) = 'image')
        union all
        select v_request, 0, jsonb_build_object('role', 'user', 'content', pycontext._fenced('memory-context', memory))
        where pycontext._has_text(memory)) m;
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

-- Whether something was pruned, cut or left out for a window to fit. What a pruning pass settled is no emergency.
create or replace function pycontext._is_degraded(chat_id text, rows pycontext.window_row[])
returns boolean
language sql stable
as $$
    select bool_or(w.section = 'omitted' or w.is_shortened and (w.seq < (
        select c.prune_unit from pycontext.chat c where c.chat_id = _is_degraded.chat_id)) is not true)
    from unnest(rows) w
$$;

-- The results among the rows that their tools called errors, by seq.
create or replace function pycontext._failed(chat_id text, rows pycontext.window_row[])
returns bigint[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_source text := pycontext._source_of(chat_id);
    v_results bigint[] := array(select w.seq from unnest(rows) w where w.role = 'tool' and w.message_id is not null);
begin
    if v_results = '{}' then
        return v_results;
    end if;
    if v_source is null then
        return array(
            select r.seq from pycontext._stored_row r
            where r.chat_id = _failed.chat_id and r.seq = any (v_results) and r.line_no = 0 and r.metadata ->> 'is_error' = 'true');
    end if;
    return array(
        select r.seq
        from (
            select array_agg(w.seq) as units from unnest(rows) w where w.tool_calls is not null and w.message_id is not null) u
        cross join lateral pycontext._thread_rows(_failed.chat_id, v_source, u.units, u.units) r
        where r.seq = any (v_results) and r.metadata ->> 'is_error' = 'true');
end
$$;

create or replace function pycontext._strict_roles(chat_id text)
returns boolean
language sql stable
as $$
    select p.strict_roles from pycontext.profile p
    where p.profile = coalesce((select c.profile from pycontext.chat c where c.chat_id = _strict_roles.chat_id), 'default')
$$;

-- OpenAI chat completions. memory: text of recalled memory, fenced here, never stored.
create or replace function pycontext.openai_messages(
    chat_id text, token_budget integer default null, as_of text default null, memory text default null)
returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select pycontext._openai_of(pycontext._window_array(chat_id, token_budget, as_of), memory, pycontext._strict_roles(chat_id))
$$;

-- Content blocks of one message for Anthropic. Signed thinking stays as it came, other providers' reasoning does not go
-- in; no message of the assistant's ends on thinking.
create or replace function pycontext._anthropic_blocks(content jsonb, role text, has_calls boolean)
returns jsonb
language sql immutable parallel safe
as $$
    select case jsonb_typeof(content)
        when 'string' then jsonb_build_array(jsonb_build_object('type', 'text', 'text', content #>> '{}'))
        when 'array' then (
            select coalesce(jsonb_agg(case
                when k.kind = 'reasoning' then e.value
                when k.kind = 'text' then jsonb_build_object('type', 'text', 'text', pycontext._part_text(e.value))
                when k.kind = 'image' and (role = 'assistant' or u.url is null and pycontext._string(e.value #> '{source,file_id}') is null)
                    then '{"type": "text", "text": "[image]"}'
                when k.kind = 'image' and u.url is null then e.value - 'cache_control'
                when k.kind = 'image' and u.url like 'data:%' then jsonb_build_object('type', 'image', 'source',
                    jsonb_build_object('type', 'base64', 'media_type', substring(u.url from '^data:([^;,]+)'),
                        'data', substring(u.url from ',(.*)$')))
                when k.kind = 'image' then
                    jsonb_build_object('type', 'image', 'source', jsonb_build_object('type', 'url', 'url', u.url))
                when role = 'user' and e.value ->> 'type' in ('document', 'search_result')
                    or role = 'assistant' and e.value ->> 'type' ~ '^(server_tool_use|mcp_tool_use|\w+_tool_result)$'
                    then e.value - 'cache_control'
                else jsonb_build_object('type', 'text', 'text', pycontext._part_json(e.value))
            end order by e.ordinality), '[]')
            || case when has_calls or (array_agg(k.kind order by e.ordinality desc))[1] <> 'reasoning' then '[]'
                else '[{"type": "text", "text": "(empty)"}]'::jsonb end
            from jsonb_array_elements(content) with ordinality e
            cross join lateral (select pycontext._part_kind(e.value) as kind) k
            cross join lateral (select case when k.kind = 'image' then pycontext._image_url(e.value) end as url) u
            where k.kind <> 'reasoning' or role = 'assistant' and case e.value ->> 'type'
                when 'redacted_thinking' then pycontext._string(e.value -> 'data') is not null
                when 'thinking' then pycontext._string(e.value -> 'signature') is not null
                    and jsonb_typeof(e.value -> 'thinking') = 'string' end)
        else '[]'
    end
$$;

-- The calls of Anthropic's own tools whose result is not in these rows, and the results without their call: ids. A call of the
-- open turn still waits for its result: the model goes on where it paused.
create or replace function pycontext._lone_uses(rows pycontext.window_row[])
returns text[]
language sql immutable parallel safe
as $$
    select array(
        select u.id
        from (
            select coalesce(e.value ->> 'tool_use_id', e.value ->> 'id') as id, e.value ? 'tool_use_id' as is_result, w.ordinal
            from unnest(rows) w
            cross join jsonb_array_elements(case jsonb_typeof(w.content) when 'array' then w.content else '[]' end) e
            where w.role = 'assistant' and e.value ->> 'type' ~ '^(server_tool_use|mcp_tool_use|\w+_tool_result)$') u
        group by u.id
        having bool_and(u.is_result) or not bool_or(u.is_result) and max(u.ordinal) < (
            select max(x.ordinal) from unnest(rows) x where x.role not in ('assistant', 'tool')))
$$;

-- Whether a reply ends at a call of Anthropic's own tools: it is paused, and goes on from there, and only from there.
create or replace function pycontext._is_paused(content jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select exists (
        select from jsonb_array_elements(case jsonb_typeof(content) when 'array' then content else '[]' end) e
        where e.value ->> 'type' in ('server_tool_use', 'mcp_tool_use')
            and not content @> jsonb_build_array(jsonb_build_object('tool_use_id', e.value -> 'id')))
$$;

-- The ids of a row's calls as they are sent: of an alphabet that every provider takes, and unique in the request. A later
-- use of an id takes the place of its call along; `used` holds what stands in the request already.
create or replace function pycontext._call_ids(tool_calls jsonb, seq bigint, used jsonb)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids jsonb := '{}';
    v_id text;
    v_clean text;
    v_sent text;
    n integer;
begin
    for v_id in
        select e.value ->> 'id' from jsonb_array_elements(tool_calls) with ordinality e order by e.ordinality
    loop
        v_clean := left(regexp_replace(v_id, '[^a-zA-Z0-9_-]', '_', 'g'), 64);
        v_sent := v_clean;
        n := 0;
        while used ? v_sent loop
            v_sent := left(v_clean, 40) || '_' || seq || case when n > 0 then '_' || n else '' end;
            n := n + 1;
        end loop;
        used := used || jsonb_build_object(v_sent, true);
        v_ids := v_ids || jsonb_build_object(v_id, v_sent);
    end loop;
    return v_ids;
end
$$;

-- A call's input must be an object for Anthropic; what does not parse is passed whole under one key.
create or replace function pycontext._call_input(arguments text)
returns jsonb
language sql immutable parallel safe
as $$
    select case jsonb_typeof(p.parsed) when 'object' then p.parsed else jsonb_build_object('arguments', arguments) end
    from pycontext._parsed(arguments) p (parsed)
$$;

-- Where Anthropic's cache marks go: ordinals of the rows that end a prefix worth keeping, at most four. The system prompt;
-- the head, which the summary after it leaves in place; the last row of the request before, which is the row before the
-- newest reply; the newest row. Memory stands before the newest request and is gone in the next turn: where it is given,
-- the row before it takes the head's place, and a new turn looks back to the row before the last turn's memory.
-- thinking_seq: the first row of the last turn whose reasoning is left out now; what follows it reads otherwise.
create or replace function pycontext._cache_marks(rows pycontext.window_row[], has_memory boolean, thinking_seq bigint)
returns integer[]
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_system integer;
    v_border integer;
    v_request integer;
    v_earlier integer;
    v_reply integer;
    v_last integer;
    v_before integer;
begin
    select max(w.ordinal) filter (where w.section = 'system'),
        coalesce(max(w.ordinal) filter (where w.section = 'head'), max(w.ordinal) filter (where w.section = 'summary')),
        max(w.ordinal) filter (where w.role = 'user' and w.kind = 'message' and w.section <> 'omitted'),
        max(w.ordinal) filter (where w.role = 'assistant' and w.follows is distinct from 'assistant'),
        max(w.ordinal) filter (where w.seq is not null)
    into v_system, v_border, v_request, v_reply, v_last
    from (select t.*, lag(t.role) over (order by t.ordinal) as follows from unnest(rows) t) w;
    v_before := v_reply - 1;
    if v_request > v_reply then
        -- the first request of a turn: how far does it read as the last one did?
        select max(w.ordinal) into v_earlier
        from unnest(rows) w
        where w.ordinal < v_request and w.role = 'user' and w.kind = 'message' and w.section <> 'omitted';
        if has_memory then
            v_before := least(v_before, v_earlier - 1);
        else
            v_before := least(v_before, (select min(w.ordinal) - 1 from unnest(rows) w where w.seq = thinking_seq));
        end if;
    end if;
    return array(
        select distinct m.ordinal
        from unnest(array[v_system, case when has_memory then v_request - 1 else v_border end, v_before, v_last]) m (ordinal)
        where m.ordinal > 0 order by m.ordinal);
end
$$;

-- Anthropic messages: {"system": text, "messages": […]}; adjacent rows of one side are joined as separate blocks. The last
-- block of each row of `marks` gets a cache mark; with marks the system prompt is a block, too. failed: see _failed.
create or replace function pycontext._anthropic_of(rows pycontext.window_row[], memory text, marks integer[], failed bigint[])
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_mark constant jsonb := '{"type": "ephemeral"}';
    v_continue constant jsonb := '[{"type": "text", "text": "(continue)"}]';
    v_system jsonb;
    v_messages jsonb[] := '{}';
    v_blocks jsonb;
    v_row jsonb;
    v_role text;
    v_memory jsonb;
    v_ids jsonb := '{}';
    v_used jsonb := '{}';
    v_lone text[] := pycontext._lone_uses(rows);
    v_callers text[];
    w record;
begin
    v_memory := case when pycontext._has_text(memory) then jsonb_build_array(jsonb_build_object('type', 'text',
        'text', pycontext._fenced('memory-context', memory))) else '[]'::jsonb end;
    -- a call that code of Anthropic's made says so where that code is told
    if exists (select from unnest(rows) t where t.tool_calls @? '$[*].use.caller') then
        v_callers := array(
            select e.value ->> 'id'
            from unnest(rows) t
            cross join jsonb_array_elements(case jsonb_typeof(t.content) when 'array' then t.content else '[]' end) e
            where t.role = 'assistant' and e.value ->> 'type' = 'server_tool_use' and e.value ->> 'id' <> all (v_lone));
    end if;
    for w in
        select t.*, case when t.role = 'assistant' then 'assistant' else 'user' end as side,
            t.ordinal = max(t.ordinal) filter (where t.role = 'user' and t.kind = 'message' and t.section <> 'omitted')
                over () as is_request
        from unnest(rows) t
        order by t.ordinal
    loop
        if w.section = 'system' then
            v_system := case when w.ordinal = any (marks)
                then jsonb_build_array(jsonb_build_object('type', 'text', 'text', w.content, 'cache_control', v_mark))
                else w.content end;
            continue;
        end if;
        if v_role is null and w.side = 'assistant' then
            v_role := 'user';
            v_blocks := v_continue;
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
        v_row := case
            when w.role = 'tool' then jsonb_build_array(jsonb_build_object('type', 'tool_result',
                'tool_use_id', coalesce(v_ids ->> w.tool_call_id, w.tool_call_id),
                'content', pycontext._anthropic_blocks(w.content, w.role, false))
                || case when w.seq = any (failed) then '{"is_error": true}' else '{}'::jsonb end)
            when w.role in ('system', 'developer') then jsonb_build_array(jsonb_build_object('type', 'text',
                'text', pycontext._fenced('system-note', pycontext._content_text(w.content))))
            else pycontext._anthropic_blocks(w.content, w.role, w.tool_calls is not null)
        end;
        if v_lone <> '{}' and w.role = 'assistant' then
            select coalesce(jsonb_agg(case when coalesce(e.value ->> 'tool_use_id', e.value ->> 'id') = any (v_lone)
                then jsonb_build_object('type', 'text', 'text', pycontext._part_json(e.value)) else e.value end
                order by e.ordinality), '[]')
            into v_row from jsonb_array_elements(v_row) with ordinality e;
        end if;
        if w.tool_calls is not null then
            v_ids := pycontext._call_ids(w.tool_calls, w.seq, v_used);
            v_used := v_used || (select jsonb_object_agg(d.value, true) from jsonb_each_text(v_ids) d);
            v_row := v_row || (
                select jsonb_agg(jsonb_build_object('type', 'tool_use', 'id', v_ids ->> (e.value ->> 'id'),
                    'name', left(regexp_replace(e.value #>> '{function,name}', '[^a-zA-Z0-9_-]', '_', 'g'), 128),
                    'input', pycontext._call_input(e.value #>> '{function,arguments}'))
                    || case when e.value #>> '{use,caller,tool_id}' = any (v_callers) then e.value -> 'use'
                        else coalesce(e.value -> 'use', '{}') - 'caller' end order by e.ordinality)
                from jsonb_array_elements(w.tool_calls) with ordinality e);
        end if;
        if w.ordinal = any (marks) then
            v_row := jsonb_set(v_row, '{-1,cache_control}', v_mark);
        end if;
        v_blocks := v_blocks || v_row;
    end loop;
    if v_role = 'user' then
        v_blocks := v_blocks || v_memory;
        v_memory := '[]';
    end if;
    if v_role is not null then
        v_messages := v_messages || jsonb_build_object('role', v_role, 'content', v_blocks);
    end if;
    if v_memory <> '[]' or v_role is distinct from 'user' and not coalesce(v_role = 'assistant' and pycontext._is_paused(v_blocks), false) then
        v_messages := v_messages || jsonb_build_object('role', 'user', 'content', v_memory || v_continue);
    end if;
    return jsonb_strip_nulls(jsonb_build_object('system', v_system)) || jsonb_build_object('messages', to_jsonb(v_messages));
end
$$;

create or replace function pycontext.anthropic_messages(
    chat_id text, token_budget integer default null, as_of text default null, memory text default null)
returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select pycontext._anthropic_of(w.rows, memory, null, pycontext._failed(chat_id, w.rows))
    from pycontext._window_array(chat_id, token_budget, as_of) w (rows)
$$;

-- The conversation as a person scrolls it: the newest max_rows rows before before_seq by seq, oldest first, lines
-- included.
create or replace function pycontext.thread(
    chat_id text, before_seq bigint default null, max_rows integer default 50)
returns setof pycontext.thread_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
declare
    v_source text := pycontext._source_of(chat_id);
    v_to bigint := coalesce(before_seq - 1, 4611686018427387904);
begin
    if max_rows <= 0 then
        return;
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
            -- before the first row, too: a line stays where a product has deleted what it followed
            select * from pycontext._lines(thread.chat_id,
                (select case when count(*) < max_rows then pycontext._origin(v_source) else min(r.seq) end from rows r), v_to)) u
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
