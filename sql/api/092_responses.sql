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
            when k.kind = 'image' and (role in ('system', 'developer') or coalesce(u.url, u.file_id) is null)
                then '{"type": "input_text", "text": "[image]"}'
            when k.kind = 'image' then case when e.value ->> 'type' = 'input_image' then e.value - '{image_url,file_id}'::text[]
                else '{"type": "input_image"}' end || jsonb_strip_nulls(jsonb_build_object('image_url', u.url, 'file_id', u.file_id,
                    'detail', coalesce(pycontext._image_detail(e.value), 'auto')))
            when role not in ('system', 'developer') and e.value ->> 'type' = 'input_file' then e.value
            when role not in ('system', 'developer') and e.value ->> 'type' = 'file' and jsonb_typeof(e.value -> 'file') = 'object' then
                '{"type": "input_file"}'::jsonb || (e.value -> 'file')
            else jsonb_build_object('type', 'input_text', 'text', pycontext._part_json(e.value))
        end order by e.ordinality), '"(empty)"')
        from jsonb_array_elements(content) with ordinality e
        cross join lateral (select pycontext._part_kind(e.value) as kind) k
        cross join lateral (select case when k.kind = 'image' then pycontext._image_url(e.value) end as url,
            case e.value ->> 'type' when 'input_image' then pycontext._string(e.value -> 'file_id') end as file_id) u
        where k.kind <> 'reasoning')
    else content end
$$;

-- What one row of the assistant's said beside its calls, as items. A reasoning item goes in only with what follows it: a
-- later part, or (is_followed) calls or a reply. is_open: the row is of the unfinished turn, where items of hosted tools stay items.
create or replace function pycontext._responses_reply(content jsonb, is_open boolean, has_calls boolean, is_followed boolean)
returns jsonb[]
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_items jsonb[];
begin
    if jsonb_typeof(content) = 'array' then
        select array_agg(case
            when is_open and e.value ->> 'type' = 'item' and e.value #>> '{item,id}' <> '' then e.value -> 'item'
            when k.kind = 'reasoning' or is_open and k.kind in ('other', 'image')
                and e.value ->> 'type' ~ '^(mcp_\w+|(?!function|custom_tool)\w+_(call|call_output|output)|program|item_reference)$'
                then e.value
            else jsonb_build_object('type', 'message', 'role', 'assistant', 'content', case
                when k.kind = 'text' then pycontext._part_text(e.value)
                when k.kind = 'image' then '[image]'
                else coalesce(pycontext._string(e.value -> 'refusal'), pycontext._part_json(e.value)) end)
                -- commentary or final_answer: OpenAI asks for it back with every message of the assistant's
                || case when e.value ->> 'phase' in ('commentary', 'final_answer')
                    then jsonb_build_object('phase', e.value -> 'phase') else '{}' end
        end order by e.ordinality)
        into v_items
        from jsonb_array_elements(content) with ordinality e
        cross join lateral (select pycontext._part_kind(e.value) as kind) k
        where k.kind <> 'reasoning' or e.value ->> 'type' = 'compaction'
            or e.value ->> 'type' = 'reasoning' and jsonb_typeof(e.value -> 'summary') = 'array'
            and jsonb_typeof(e.value -> 'id') = 'string' and (has_calls or is_followed or exists (
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

-- What a result is, for the calls whose output must be of a certain form: image, tools, answer; else text.
create or replace function pycontext._result_kind(content jsonb)
returns text
language sql immutable parallel safe
as $$
    select case
        when content @? 'strict $[0] ? (@.type == "input_image")' then 'image'
        when content @? 'strict $[0] ? (@.type == "tool_search_output")' then 'tools'
        when content #>> '{}' ~ '^\{"approve":(true|false)[,}]' and pycontext._parsed(content #>> '{}') is not null then 'answer'
        else 'text'
    end
$$;

-- A call as an item. One that can't be told as what it was is told as a function's: its arguments were shortened to another
-- form, its result is not of the form that its output has (result: _result_kind), or it needs the id of its turn's reasoning.
create or replace function pycontext._responses_call(call jsonb, call_id text, is_open boolean, result text)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_type text := coalesce(call ->> 'type', 'function');
    v_beside jsonb := coalesce(call -> 'item', '{}') - 'at';
    v_name text := left(regexp_replace(call #>> '{function,name}', '[^a-zA-Z0-9_-]', '_', 'g'), 64);
    v_arguments text := call #>> '{function,arguments}';
    v_own jsonb;
begin
    if v_type = 'custom' then
        return v_beside || jsonb_build_object('type', 'custom_tool_call', 'call_id', call_id, 'name', v_name, 'input', v_arguments);
    elsif v_type = 'mcp_approval_request' and is_open and result = 'answer' then
        return v_beside || jsonb_build_object('type', v_type, 'name', v_name, 'arguments', v_arguments);
    elsif v_type ~ '^(shell|apply_patch)_call$' or is_open and v_beside ->> 'id' <> '' and (v_type = 'local_shell_call'
            or v_type = 'computer_call' and result = 'image') or v_type = 'tool_search_call' and result = 'tools' then
        v_own := pycontext._parsed(v_arguments);
        if v_own ?| array['action', 'actions', 'operation', 'arguments'] then
            return jsonb_build_object('type', v_type, 'call_id', call_id) || v_beside || v_own || case v_type
                when 'shell_call' then '{}'::jsonb
                when 'computer_call' then '{"status": "completed", "pending_safety_checks": []}'
                when 'tool_search_call' then '{"status": "completed", "execution": "client"}'
                else '{"status": "completed"}' end;
        end if;
    end if;
    return case when v_type = 'function' then v_beside else '{}' end
        || jsonb_build_object('type', 'function_call', 'call_id', call_id, 'name', v_name, 'arguments', v_arguments);
end
$$;

-- The output of a call, of the type that its item has. is_error: the tool failed, or nothing has come from it.
create or replace function pycontext._responses_output(call jsonb, call_id text, content jsonb, is_error boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_type text := coalesce(call ->> 'type', 'function_call');
    v_text text := coalesce(nullif(pycontext._content_text(content), ''), '(empty)');
begin
    return case v_type
        when 'local_shell_call' then jsonb_build_object('type', 'local_shell_call_output', 'id', call_id, 'output', v_text)
        when 'mcp_approval_request' then
            jsonb_build_object('type', 'mcp_approval_response', 'approval_request_id', call ->> 'id') || (content #>> '{}')::jsonb
        when 'tool_search_call' then jsonb_build_object('type', 'tool_search_output', 'call_id', call_id, 'execution', 'client',
            'status', 'completed', 'tools', content #> '{0,tools}')
        else case when call ? 'caller' then jsonb_build_object('caller', call -> 'caller') else '{}' end
            || jsonb_build_object('type', v_type || '_output', 'call_id', call_id) || case v_type
            when 'computer_call' then jsonb_build_object('output',
                (content -> 0) - 'detail' || '{"type": "computer_screenshot"}')
            when 'apply_patch_call' then jsonb_build_object('output', v_text,
                'status', case when is_error then 'failed' else 'completed' end)
            when 'shell_call' then jsonb_build_object('output', case
                when jsonb_typeof(content) = 'array' and not content @? '$[*] ? (!(@.type == "shell_output")
                    || !exists (@.stdout) || !exists (@.stderr) || !exists (@.outcome))' then (
                    select jsonb_agg(e.value - 'type' order by e.ordinality)
                    from jsonb_array_elements(content) with ordinality e)
                else jsonb_build_array(jsonb_build_object('stdout', v_text, 'stderr', '',
                    'outcome', jsonb_build_object('type', 'exit', 'exit_code', is_error::integer))) end)
            else jsonb_build_object('output', pycontext._responses_parts(content, 'tool')) end
    end;
end
$$;

-- Rows of a window as input items. failed: see _failed.
create or replace function pycontext._responses_of(
    rows pycontext.window_row[], memory text, strict_roles boolean, failed bigint[])
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_items jsonb[] := '{}';
    v_memory jsonb;
    v_ids jsonb := '{}';
    v_used jsonb := '{}';
    v_results jsonb;
    v_calls jsonb := '{}';
    v_said jsonb[];
    v_is_whole boolean;
    v_last text;
    w record;
begin
    if pycontext._has_text(memory) then
        v_memory := jsonb_build_object('type', 'message', 'role', 'user', 'content', pycontext._fenced('memory-context', memory));
    end if;
    -- what the calls came to, where their items depend on it
    select jsonb_object_agg(x.reply || '/' || x.tool_call_id, pycontext._result_kind(x.content))
    into v_results
    from (
        select t.role, t.tool_call_id, t.content,
            max(t.ordinal) filter (where t.role = 'assistant') over (order by t.ordinal) as reply
        from unnest(rows) t) x
    where x.role = 'tool' and x.reply is not null;
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
            v_said := pycontext._responses_reply(w.content, w.ordinal > w.request, w.tool_calls is not null, w.is_followed);
            if w.tool_calls is null then
                v_items := v_items || v_said;
                continue;
            end if;
            v_ids := pycontext._call_ids(w.tool_calls, w.seq, v_used);
            v_used := v_used || (select jsonb_object_agg(d.value, true) from jsonb_each_text(v_ids) d);
            select jsonb_object_agg(e.value ->> 'id', pycontext._responses_call(e.value, v_ids ->> (e.value ->> 'id'),
                w.ordinal > w.request and not w.is_shortened, v_results ->> (w.ordinal || '/' || (e.value ->> 'id'))))
            into v_calls from jsonb_array_elements(w.tool_calls) e;
            -- a call stands where it stood among reasoning and words, as long as these are all there
            v_is_whole := w.ordinal > w.request and jsonb_typeof(w.content) = 'array'
                and jsonb_array_length(w.content) = cardinality(v_said);
            v_items := v_items || array(
                select i.item
                from (
                    select s.item, s.n as at, 0 as n from unnest(v_said) with ordinality s (item, n)
                    union all
                    select v_calls -> (e.value ->> 'id'), case when v_is_whole then (e.value #>> '{item,at}')::bigint end, e.ordinality
                    from jsonb_array_elements(w.tool_calls) with ordinality e) i
                order by i.at nulls last, i.n);
        elsif w.role = 'tool' then
            v_items := v_items || pycontext._responses_output(v_calls -> w.tool_call_id, coalesce(v_ids ->> w.tool_call_id, w.tool_call_id),
                w.content, w.message_id is null or w.seq = any (failed));
        elsif w.role in ('system', 'developer') and w.section <> 'system' and strict_roles then
            v_items := v_items || jsonb_build_object('type', 'message', 'role', 'user',
                'content', pycontext._fenced('system-note', pycontext._content_text(w.content)));
        elsif w.content #>> '{0,type}' in ('additional_tools', 'configuration_update') then
            v_items := v_items || (w.content -> 0);
        elsif w.content #>> '{0,item,type}' = 'configuration_update' then
            v_items := v_items || (w.content #> '{0,item}');
        elsif w.content #>> '{0,type}' = 'compaction_trigger' then
            null;  -- what it asked for was done
        else
            v_items := v_items || jsonb_build_object('type', 'message', 'role', w.role,
                'content', pycontext._responses_parts(w.content, w.role));
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
set search_path = pg_catalog, pg_temp
as $$
    select pycontext._responses_of(w.rows, memory, pycontext._strict_roles(chat_id), pycontext._failed(chat_id, w.rows))
    from pycontext._window_array(chat_id, token_budget, as_of) w (rows)
$$;

comment on function pycontext.responses_input(text, integer, text, text) is
    'The window as input items of OpenAI''s Responses API, for a request that carries its whole context (no '
    'previous_response_id). The chat''s system prompt is the first item, role system, and not the request''s instructions: one '
    'array then is the whole prompt, in the order it is counted, and nothing depends on instructions, which the API does not '
    'carry over from one response to the next. Calls and their outputs are paired by call_id, unique in the request; reasoning '
    'items stay whole, right before the item they led to, while their turn is unfinished. memory goes fenced before the newest '
    'user message. Ends on a user message or an output, (continue) where needed. Errors: as working_window.';
