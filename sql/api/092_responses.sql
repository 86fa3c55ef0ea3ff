-- The window as input of OpenAI's Responses API: message items, reasoning items whole and right before the item they led to,
-- function_call items each with its function_call_output in the same unit.

-- A user's (or the system's) content: text as it is, or parts of the Responses API, whichever provider's they came as.
create or replace function pycontext._responses_parts(content jsonb, role text)
returns jsonb
language sql immutable parallel safe
as $$
    select case when jsonb_typeof(content) = 'array' then (
        select coalesce(jsonb_agg(case
            when k.kind = 'text' then jsonb_build_object('type', 'input_text', 'text', pycontext._part_text(e.value))
            when k.kind = 'image' and role in ('system', 'developer') then '{"type": "input_text", "text": "[image]"}'
            when e.value ->> 'type' in ('input_image', 'input_file') then
                case k.kind when 'image' then '{"detail": "auto"}'::jsonb else '{}' end || e.value
            when k.kind = 'image' and u.url is not null then jsonb_build_object('type', 'input_image', 'image_url', u.url,
                'detail', coalesce(e.value #>> '{image_url,detail}', 'auto'))
            when k.kind = 'image' then '{"type": "input_text", "text": "[image]"}'
            when e.value ->> 'type' = 'file' and jsonb_typeof(e.value -> 'file') = 'object' then
                '{"type": "input_file"}'::jsonb || (e.value -> 'file')
            else jsonb_build_object('type', 'input_text', 'text', pycontext._part_json(e.value))
        end order by e.ordinality), '"(empty)"')
        from jsonb_array_elements(content) with ordinality e
        cross join lateral (select pycontext._part_kind(e.value) as kind) k
        cross join lateral (select case when k.kind = 'image' then pycontext._image_url(e.value) end as url) u
        where k.kind <> 'reasoning')
    else content end
$$;

-- What one row of the assistant's said before its calls, as items. A reasoning item goes in only with what follows it: a
-- later part, or (is_followed) calls or a reply. is_open: the row is of the unfinished turn, where calls of built-in tools stay items.
create or replace function pycontext._responses_reply(content jsonb, is_open boolean, has_calls boolean, is_followed boolean)
returns jsonb[]
language plpgsql immutable parallel safe
set search_path = ''
as $$
declare
    v_items jsonb[];
begin
    if jsonb_typeof(content) = 'array' then
        select array_agg(case
            when k.kind = 'reasoning' or is_open and k.kind = 'other' and e.value ->> 'type' ~ '^\w+_(call|list_tools)$' then e.value
            else jsonb_build_object('type', 'message', 'role', 'assistant', 'content', case
                when k.kind = 'text' then pycontext._part_text(e.value)
                when k.kind = 'image' then '[image]'
                else coalesce(e.value ->> 'refusal', pycontext._part_json(e.value)) end)
        end order by e.ordinality)
        into v_items
        from jsonb_array_elements(content) with ordinality e
        cross join lateral (select pycontext._part_kind(e.value) as kind) k
        where k.kind <> 'reasoning' or e.value ->> 'type' = 'reasoning' and jsonb_typeof(e.value -> 'summary') = 'array'
            and (has_calls or is_followed or exists (
                select from jsonb_array_elements(content) with ordinality x
                where x.ordinality > e.ordinality and pycontext._part_kind(x.value) <> 'reasoning'));
    elsif content is not null then
        v_items := array[jsonb_build_object('type', 'message', 'role', 'assistant', 'content', content)];
    end if;
    if v_items is null and not has_calls then
        v_items := array['{"type": "message", "role": "assistant", "content": "(empty)"}'::jsonb];
    end if;
    return coalesce(v_items, '{}');
end
$$;

-- Rows of a window as input items.
create or replace function pycontext._responses_of(rows pycontext.window_row[], memory text, strict_roles boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = ''
as $$
declare
    v_items jsonb[] := '{}';
    v_memory jsonb;
    v_ids jsonb := '{}';
    v_used jsonb := '{}';
    v_last text;
    w record;
begin
    if memory ~ '\S' then
        v_memory := jsonb_build_object('type', 'message', 'role', 'user', 'content', pycontext._fenced('memory-context', memory));
    end if;
    for w in
        select t.*, q.request, lead(t.role) over (order by t.ordinal) is not distinct from 'assistant' as is_followed
        from unnest(rows) t
        cross join (
            select coalesce(max(x.ordinal), 0) as request from unnest(rows) x
            where x.role = 'user' and x.kind = 'message' and x.section <> 'omitted') q
        order by t.ordinal
    loop
        if w.ordinal = w.request and v_memory is not null then
            v_items := v_items || v_memory;
            v_memory := null;
        end if;
        v_last := w.role;
        if w.role = 'assistant' then
            v_items := v_items || pycontext._responses_reply(w.content, w.ordinal > w.request, w.tool_calls is not null, w.is_followed);
        elsif w.role = 'tool' then
            v_items := v_items || jsonb_build_object('type', 'function_call_output', 'call_id',
                coalesce(v_ids ->> w.tool_call_id, w.tool_call_id), 'output', pycontext._responses_parts(w.content, w.role));
        elsif w.role in ('system', 'developer') and w.section <> 'system' and strict_roles then
            v_items := v_items || jsonb_build_object('type', 'message', 'role', 'user',
                'content', pycontext._fenced('system-note', pycontext._content_text(w.content)));
        else
            v_items := v_items || jsonb_build_object('type', 'message', 'role', w.role,
                'content', pycontext._responses_parts(w.content, w.role));
        end if;
        if w.tool_calls is not null then
            v_ids := pycontext._call_ids(w.tool_calls, w.seq, v_used);
            v_used := v_used || (select jsonb_object_agg(d.value, true) from jsonb_each_text(v_ids) d);
            v_items := v_items || array(
                select jsonb_build_object('type', 'function_call', 'call_id', v_ids ->> (e.value ->> 'id'),
                    'name', left(regexp_replace(e.value #>> '{function,name}', '[^a-zA-Z0-9_-]', '_', 'g'), 64),
                    'arguments', e.value #>> '{function,arguments}')
                from jsonb_array_elements(w.tool_calls) with ordinality e order by e.ordinality);
        end if;
    end loop;
    if v_memory is not null then
        v_items := v_items || v_memory;
    end if;
    if v_last is null or v_last not in ('user', 'tool') then
        v_items := v_items || '{"type": "message", "role": "user", "content": "(continue)"}'::jsonb;
    end if;
    return to_jsonb(v_items);
end
$$;

-- OpenAI Responses input items. memory: text of recalled memory, fenced here, never stored.
create or replace function pycontext.responses_input(
    chat_id text, token_budget integer default null, as_of text default null, memory text default null)
returns jsonb
language sql stable
set search_path = ''
as $$
    select pycontext._responses_of(pycontext._window_array(chat_id, token_budget, as_of), memory, pycontext._strict_roles(chat_id))
$$;

comment on function pycontext.responses_input(text, integer, text, text) is
    'The window as input items of OpenAI''s Responses API, for a request that carries its whole context (no '
    'previous_response_id). The chat''s system prompt is the first item, role system, and not the request''s instructions: one '
    'array then is the whole prompt, in the order it is counted, and nothing depends on instructions, which the API does not '
    'carry over from one response to the next. Calls and their outputs are paired by call_id, unique in the request; reasoning '
    'items stay whole, right before the item they led to, while their turn is unfinished. memory goes fenced before the newest '
    'user message. Ends on a user message or an output, (continue) where needed. Errors: as working_window.';
