-- How a stored row becomes what the model reads, and the one rule for what that costs.

-- Tags of our own fences in a text that came from outside.
create or replace function pycontext._has_fence(body text)
returns boolean
language sql immutable parallel safe
as $$
    select body ~* '<[\\/\s]*(memory-context|chat-summary|turn-context|system-note)'
$$;

-- One character inside each such tag makes it plain text.
create or replace function pycontext._escape_fences(body text)
returns text
language sql immutable parallel safe
as $$
    select regexp_replace(body, '<(?=[\\/\s]*(memory-context|chat-summary|turn-context|system-note))', '<\\', 'gi')
$$;

-- Whether JSON is nested deeper than every client reads it back: Python's gives up before a thousand levels.
create or replace function pycontext._is_deep(j jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select j @? '$.**{200}'
$$;

-- A text as JSON; null where it is none, or too deep.
create or replace function pycontext._parsed(body text)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_parsed jsonb;
begin
    v_parsed := body::jsonb;
    return case when not pycontext._is_deep(v_parsed) then v_parsed end;
exception when others then
    return null;
end
$$;

create or replace function pycontext._part_kind(part jsonb)
returns text
language sql immutable parallel safe
as $$
    select case
        when jsonb_typeof(part) = 'string' then 'text'
        when part ->> 'type' in ('text', 'input_text', 'output_text') then 'text'
        when part ->> 'type' in ('image_url', 'image', 'input_image', 'image_generation_call') then 'image'
        when part ->> 'type' in ('thinking', 'redacted_thinking', 'reasoning', 'compaction') then 'reasoning'
        when part ->> 'type' in ('file', 'input_file', 'input_audio')
            or part ->> 'type' = 'document' and part #>> '{source,type}' in ('base64', 'url', 'file') then 'file'
        else 'other'
    end
$$;

-- A part as text: a file without its data.
create or replace function pycontext._part_json(part jsonb)
returns text
language sql immutable parallel safe
as $$
    select case when pycontext._part_kind(part) <> 'file' then part else (
        select jsonb_object_agg(e.key, case when e.key in ('file', 'input_audio', 'source') and jsonb_typeof(e.value) = 'object'
            then e.value - array['file_data', 'data'] else e.value end)
        from jsonb_each(part - 'file_data') e) end::text
$$;

-- Whether a text has more than white space, as providers see it (the database's locale may not know U+00A0 and its like).
create or replace function pycontext._has_text(body text)
returns boolean
language sql immutable parallel safe
as $$
    select body ~ '[^\s\u001c-\u001f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
$$;

-- The text of a JSON string; null where it is none, or blank.
create or replace function pycontext._string(j jsonb)
returns text
language sql immutable parallel safe
as $$
    select case when jsonb_typeof(j) = 'string' and pycontext._has_text(j #>> '{}') then j #>> '{}' end
$$;

create or replace function pycontext._part_text(part jsonb)
returns text
language sql immutable parallel safe
as $$
    select case when jsonb_typeof(part) = 'string' then part #>> '{}' else coalesce(part ->> 'text', '') end
$$;

-- The readable text of a content: what stubs, summaries, search and previews look at.
create or replace function pycontext._content_text(content jsonb)
returns text
language sql immutable parallel safe
as $$
    select case jsonb_typeof(content)
        when 'string' then content #>> '{}'
        when 'array' then (
            select string_agg(case pycontext._part_kind(e.value)
                when 'text' then pycontext._part_text(e.value)
                when 'image' then '[image]'
                else pycontext._part_json(e.value)
            end, E'\n' order by e.ordinality)
            from jsonb_array_elements(content) with ordinality e
            where pycontext._part_kind(e.value) <> 'reasoning')
    end
$$;

create or replace function pycontext._escape_content(content jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select case jsonb_typeof(content)
        when 'string' then to_jsonb(pycontext._escape_fences(content #>> '{}'))
        when 'array' then (
            select jsonb_agg(case
                when jsonb_typeof(e.value) = 'string' then to_jsonb(pycontext._escape_fences(e.value #>> '{}'))
                when e.value ? 'text' then jsonb_set(e.value, '{text}',
                    to_jsonb(pycontext._escape_fences(e.value ->> 'text')))
                when pycontext._part_kind(e.value) in ('file', 'other') then
                    -- in JSON the character is written as two
                    regexp_replace(e.value::text, '<(?=[\\/\s]*(memory-context|chat-summary|turn-context|system-note))',
                        '<\\\\', 'gi')::jsonb
                else e.value
            end order by e.ordinality)
            from jsonb_array_elements(content) with ordinality e)
        else content
    end
$$;

create or replace function pycontext._is_blank(content jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select case jsonb_typeof(content)
        when 'string' then not pycontext._has_text(content #>> '{}')
        when 'array' then not exists (
            select from jsonb_array_elements(content) e
            where pycontext._part_kind(e.value) <> 'text' or pycontext._has_text(pycontext._part_text(e.value)))
        else true
    end
$$;

create or replace function pycontext._without_reasoning(content jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select case when jsonb_typeof(content) = 'array' then (
        select jsonb_agg(e.value order by e.ordinality)
        from jsonb_array_elements(content) with ordinality e
        where pycontext._part_kind(e.value) <> 'reasoning')
    else content end
$$;

create or replace function pycontext._without_images(content jsonb, seq bigint)
returns jsonb
language sql immutable parallel safe
as $$
    select case when jsonb_typeof(content) = 'array' then (
        select jsonb_agg(case when pycontext._part_kind(e.value) in ('image', 'file')
            then jsonb_build_object('type', 'text', 'text', format('[%s left out; #%s]', pycontext._part_kind(e.value), seq))
            else e.value end order by e.ordinality)
        from jsonb_array_elements(content) with ordinality e)
    else content end
$$;

create or replace function pycontext._reduced(content jsonb, seq bigint, drop_images boolean, drop_reasoning boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    if drop_images then
        content := pycontext._without_images(content, seq);
    end if;
    if drop_reasoning then
        content := pycontext._without_reasoning(content);
    end if;
    return content;
end
$$;

-- The content as sent. A result whose call is not in view is told as a note, never as a result.
create or replace function pycontext._rendered(
    content jsonb, has_fence boolean, is_orphan boolean, tool_call_id text, has_calls boolean)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_content jsonb := content;
begin
    if has_fence then
        v_content := pycontext._escape_content(v_content);
    end if;
    if is_orphan then
        return to_jsonb(format(E'[result of tool call%s, which is not in view]\n%s',
            ' ' || pycontext._escape_fences(nullif(tool_call_id, '')),
            coalesce(nullif(pycontext._content_text(v_content), ''), '(empty)')));
    end if;
    if pycontext._is_blank(v_content) then
        return case when has_calls then null else '"(empty)"'::jsonb end;
    end if;
    if jsonb_typeof(v_content) = 'array' then
        -- providers refuse an empty text block
        select jsonb_agg(e.value order by e.ordinality) into v_content
        from jsonb_array_elements(v_content) with ordinality e
        where pycontext._part_kind(e.value) <> 'text' or pycontext._has_text(pycontext._part_text(e.value));
    end if;
    return v_content;
end
$$;

-- What a rendered message costs: overhead + the tokens of each text (DESIGN: 4 a message, 12 a call,
-- 8 a result, 1 for a name, images and files flat). The estimate and the exact count both start here.
create or replace function pycontext._count_pieces(
    content jsonb, tool_calls jsonb, role text, name text, image_tokens integer,
    out overhead integer, out texts text[], out reasoning text[], out images integer)
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    images := 0;
    texts := '{}';
    reasoning := '{}';
    if jsonb_typeof(content) = 'array' then
        select
            coalesce(array_agg(case pycontext._part_kind(e.value)
                when 'text' then pycontext._part_text(e.value) else pycontext._part_json(e.value) end order by e.ordinality)
                filter (where pycontext._part_kind(e.value) in ('text', 'file', 'other')), '{}'),
            coalesce(array_agg(e.value::text order by e.ordinality)
                filter (where pycontext._part_kind(e.value) = 'reasoning'), '{}'),
            count(*) filter (where pycontext._part_kind(e.value) in ('image', 'file'))
        into texts, reasoning, images
        from jsonb_array_elements(content) with ordinality e;
    elsif content is not null then
        texts := array[content #>> '{}'];
    end if;
    overhead := 4 + images * image_tokens + case when role = 'tool' then 8 else 0 end;
    if tool_calls is not null then
        overhead := overhead + 12 * jsonb_array_length(tool_calls);
        texts := texts || (
            select array_agg(t.piece order by e.ordinality, t.n)
            from jsonb_array_elements(tool_calls) with ordinality e
            cross join lateral (values
                (1, coalesce(e.value #>> '{function,name}', e.value #>> '{custom,name}')),
                (2, coalesce(e.value #>> '{function,arguments}', e.value #>> '{custom,input}'))) t (n, piece));
    end if;
    if name is not null then
        overhead := overhead + 1;
        texts := texts || name;
    end if;
end
$$;

create or replace function pycontext._estimate_pieces(texts text[])
returns integer
language sql immutable parallel safe
as $$
    select coalesce(sum(pycontext.estimate_tokens(t.piece)), 0)::integer from unnest(texts) t (piece)
$$;

-- The exit status that a result tells at its beginning or end.
create or replace function pycontext._exit_status(body text)
returns text
language sql immutable parallel safe
as $$
    select substring(left(body, 400) || E'\n' || right(body, 600)
        from '(?i)exit(?:ed)?(?: with)?(?: code| status)?[:= ]+(-?[0-9]{1,3})\M')
$$;

-- One line instead of an old tool result: tool, main argument, size, outcome, and the #seq that brings it back.
create or replace function pycontext._stub(tool text, argument text, body text, is_error boolean, seq bigint)
returns text
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_exit text := pycontext._exit_status(body);
    v_first text := substring(body from '\S[^\n]*');
    v_last text := substring(right(body, 400) from '[^\n]*\S(?=\s*$)');
    v_line text := v_first;
begin
    -- an error is told where it stands: in the last line of a failed run, else the first line says most
    if (is_error or v_exit <> '0' or v_last ~* '^\s*\S*(error|exception|fatal|failed|denied)\M')
        and v_last <> v_first then
        v_line := v_last;
    end if;
    v_line := left(btrim(regexp_replace(coalesce(v_line, ''), '\s+', ' ', 'g')), 120);
    return pycontext._escape_fences(format('[%s%s: %s%s characters, %s lines%s; shortened, full text is #%s]',
        coalesce(tool, 'tool'), coalesce(' ' || argument, ''), case when is_error then 'error, ' else '' end,
        length(body), length(body) - length(replace(body, E'\n', '')) + 1,
        coalesce(', exit ' || v_exit, '') || case when v_line <> '' then ', "' || v_line || '"' else '' end, seq));
end
$$;

-- The same of a result that an earlier one told already: that one's line says the rest.
create or replace function pycontext._repeat_stub(
    tool text, argument text, body text, is_error boolean, seq bigint, told_seq bigint)
returns text
language sql immutable parallel safe
as $$
    select pycontext._escape_fences(format('[%s%s: %s%s characters%s, the same as #%s; shortened, full text is #%s]',
        coalesce(tool, 'tool'), coalesce(' ' || argument, ''), case when is_error then 'error, ' else '' end,
        length(body), coalesce(', exit ' || pycontext._exit_status(body), ''), told_seq, seq))
$$;

-- The argument that says what a call was about.
create or replace function pycontext._main_argument(arguments text)
returns text
language sql immutable parallel safe
as $$
    select left(replace(replace(coalesce(
        substring(left(arguments, 4000) from
            '"(?:path|file_path|filename|file|command|cmd|query|url|id|order_id|user_id|reservation_id|name)"\s*:\s*"((?:[^"\\]|\\.)+)"'),
        substring(left(arguments, 4000) from ':\s*"((?:[^"\\]|\\.)+)"')), '\n', ' '), '\"', '"'), 80)
$$;
