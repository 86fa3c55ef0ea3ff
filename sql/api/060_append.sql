-- Checks one message of the OpenAI chat format; position is its place in the caller's array, for the error.
create or replace function pycontext._check_message(m jsonb, n bigint)
returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_at text := format('message %s: %s', n, left(m::text, 200));
    v_call jsonb;
begin
    if jsonb_typeof(m) <> 'object' then
        perform pycontext._raise('PCX02', 'a message must be an object', v_at, 'pass {"role": …, "content": …}');
    end if;
    if pycontext._is_deep(m) then
        perform pycontext._raise('PCX02', 'a message is nested too deeply', v_at, 'pass what is deeper than 200 levels as text');
    end if;
    if coalesce(m ->> 'role', '') not in ('user', 'assistant', 'tool', 'system', 'developer') then
        perform pycontext._raise('PCX02', 'unknown role', format('role is %s in %s', coalesce(m -> 'role', 'null'), v_at),
            case when left(m ->> 'role', 1) in ('{', '[')
                then 'append_message takes role and content one by one: (chat_id, ''user'', ''…''); append_messages takes [{"role": …}]'
                else 'use user, assistant, tool, system or developer' end);
    end if;
    if coalesce(jsonb_typeof(m -> 'content'), 'null') not in ('string', 'array', 'null') then
        perform pycontext._raise('PCX02', 'content must be text, an array of parts or null',
            format('content is a %s in %s', jsonb_typeof(m -> 'content'), v_at), 'pass a string or [{"type": "text", "text": …}]');
    end if;
    if jsonb_typeof(m -> 'content') = 'array' and exists (
        select from jsonb_array_elements(m -> 'content') e
        where jsonb_typeof(e.value) not in ('object', 'string')
            or (jsonb_typeof(e.value) = 'object' and coalesce(jsonb_typeof(e.value -> 'type'), '') <> 'string')
            or (e.value ? 'text' and jsonb_typeof(e.value -> 'text') <> 'string')) then
        perform pycontext._raise('PCX02', 'a content part must be an object with a type', v_at,
            'pass parts such as {"type": "text", "text": …}');
    end if;
    if m ->> 'role' = 'tool' and coalesce(m ->> 'tool_call_id', '') = '' then
        perform pycontext._raise('PCX04', 'a tool result needs the id of its call', v_at,
            'set tool_call_id to the id in the assistant''s tool_calls');
    end if;
    if jsonb_typeof(m -> 'function_call') = 'object' then
        perform pycontext._raise('PCX02', 'function_call is the old form of tool_calls', v_at,
            'pass [{"id": …, "type": "function", "function": {…}}] as tool_calls');
    end if;
    if coalesce(jsonb_typeof(m -> 'tool_calls'), 'null') not in ('array', 'null') then
        perform pycontext._raise('PCX02', 'tool_calls must be an array', v_at, 'pass [{"id": …, "type": "function", "function": {…}}]');
    end if;
    if jsonb_typeof(m -> 'tool_calls') = 'array' and jsonb_array_length(m -> 'tool_calls') > 0 then
        if m ->> 'role' <> 'assistant' then
            perform pycontext._raise('PCX02', 'only an assistant message has tool calls', v_at, 'check the role');
        end if;
        for v_call in select e.value from jsonb_array_elements(m -> 'tool_calls') e loop
            if coalesce(v_call ->> 'id', '') = '' or coalesce(v_call #>> '{function,name}', v_call #>> '{custom,name}', '') = ''
                or coalesce(jsonb_typeof(v_call #> '{function,arguments}'), 'null') not in ('string', 'object', 'null') then
                perform pycontext._raise('PCX02', 'a tool call needs id, function.name and arguments as text',
                    format('call %s in %s', left(v_call::text, 120), v_at), 'pass the call as the provider returned it');
            end if;
        end loop;
        if (select count(distinct e.value ->> 'id') from jsonb_array_elements(m -> 'tool_calls') e)
            <> jsonb_array_length(m -> 'tool_calls') then
            perform pycontext._raise('PCX02', 'two calls of one message share an id', v_at, 'give each call its own id');
        end if;
    end if;
    if jsonb_typeof(m -> 'tokens') is not null and jsonb_typeof(m -> 'tokens') <> 'null'
        and (jsonb_typeof(m #> '{tokens,encoding}') is distinct from 'string'
            or coalesce(m #>> '{tokens,count}', '') !~ '^[0-9]{1,9}$') then
        perform pycontext._raise('PCX02', 'tokens must be {"encoding": …, "count": …}', v_at,
            'pass the tokenizer''s name and a whole number, or leave it out');
    end if;
    if coalesce(jsonb_typeof(m -> 'metadata'), 'null') not in ('object', 'null') then
        perform pycontext._raise('PCX02', 'metadata must be an object', v_at, 'pass {} or leave it out');
    end if;
end
$$;

-- A time as the caller wrote it, or PCX02.
create or replace function pycontext._time_of(value text, n bigint)
returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_time timestamptz;
begin
    begin
        v_time := value::timestamptz;
    exception when others then
        null;
    end;
    -- years that every client knows: Python's and JSON's have four digits, in any time zone
    if v_time between '0001-01-02Z' and '9999-12-30Z' then
        return v_time;
    end if;
    perform pycontext._raise('PCX02', 'created_at is not a time', format('created_at is %L in message %s', value, n),
        'pass ISO 8601, such as 2026-01-31T12:00:00Z');
end
$$;

-- Arguments are a string for ever; an object (from a caller who parsed them) becomes its text. A custom tool's call is kept as
-- a function's, its input as arguments.
create or replace function pycontext._clean_calls(tool_calls jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select jsonb_agg(case when jsonb_typeof(e.value #> '{function,arguments}') = 'string' then e.value
        when e.value ? 'custom' then (e.value - 'custom') || jsonb_build_object('function', jsonb_build_object(
            'name', e.value #>> '{custom,name}', 'arguments', coalesce(e.value #>> '{custom,input}', '')))
        else jsonb_set(e.value, '{function,arguments}', to_jsonb(coalesce(e.value #>> '{function,arguments}', '{}'))) end
        order by e.ordinality)
    from jsonb_array_elements(tool_calls) with ordinality e
$$;

create or replace function pycontext._digest(
    role text, content jsonb, tool_calls jsonb, tool_call_id text, name text)
returns bytea
language sql immutable parallel safe
as $$
    select substring(sha256(convert_to(
        jsonb_build_array(role, content, tool_calls, tool_call_id, name)::text, 'UTF8')) from 1 for 16)
$$;

-- Appends in order, in one transaction; a message id that is there with the same body returns its row and
-- takes no seq (PCX03 with another body). PCX01, PCX02, PCX04, PCX09; nothing is written on error.
create or replace function pycontext.append_messages(chat_id text, messages jsonb)
returns setof pycontext.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    p pycontext.profile;
    r pycontext.message;
    v_old pycontext.message;
    m jsonb;
    n bigint;
    k record;
    v_open jsonb;
    v_body text;
    v_rendered jsonb;
    v_blank pycontext.message;
    v_count jsonb;
    v_now timestamptz := clock_timestamp();
    v_act bigint;
    v_is_error boolean;
    v_told bigint;
begin
    if coalesce(jsonb_typeof(messages), 'null') <> 'array' then
        perform pycontext._raise('PCX02', 'messages must be an array',
            format('got %s', coalesce(left(messages::text, 200), 'null')), 'pass [{"role": …, "content": …}]');
    end if;
    c := pycontext._lock_chat(chat_id, true);
    select t.* into p from pycontext.profile t where t.profile = c.profile;
    for m, n in select e.value, e.ordinality from jsonb_array_elements(messages) with ordinality e loop
        perform pycontext._check_message(m, n);
        r := v_blank;
        r.chat_id := c.chat_id;
        r.tenant := c.tenant;
        r.line_no := 0;
        r.kind := 'message';
        r.role := m ->> 'role';
        r.content := nullif(m -> 'content', 'null');
        r.name := nullif(m ->> 'name', '');
        r.tool_call_id := case when r.role = 'tool' then m ->> 'tool_call_id' end;
        r.metadata := nullif(m -> 'metadata', 'null');
        if r.role = 'tool' and m ->> 'is_error' = 'true' then
            r.metadata := '{"is_error": true}'::jsonb || coalesce(r.metadata, '{}');
        end if;
        r.calls := 0;
        if r.role = 'assistant' and jsonb_typeof(m -> 'tool_calls') = 'array' and jsonb_array_length(m -> 'tool_calls') > 0 then
            r.tool_calls := pycontext._clean_calls(m -> 'tool_calls');
            r.calls := jsonb_array_length(r.tool_calls);
        end if;
        r.digest := pycontext._digest(r.role, r.content, r.tool_calls, r.tool_call_id, r.name);
        r.message_id := nullif(m ->> 'message_id', '');
        if r.message_id is not null then
            select t.* into v_old from pycontext.message t
            where t.chat_id = c.chat_id and t.message_id = r.message_id;
            if found then
                if v_old.redacted_act is not null then
                    return next v_old;  -- erased, body and digest: never compared, never restored
                    continue;
                end if;
                if v_old.digest is distinct from r.digest then
                    perform pycontext._raise('PCX03', 'this message id was used with another body',
                        format('message_id is %L, seq %s, message %s of this call', r.message_id, v_old.seq, n),
                        'give a new message its own id; stored messages are never changed');
                end if;
                return next v_old;
                continue;
            end if;
        else
            r.message_id := gen_random_uuid()::text;
        end if;
        r.created_at := v_now;
        if m ->> 'created_at' is not null then
            r.created_at := pycontext._time_of(m ->> 'created_at', n);
        end if;
        r.seq := c.last_seq + 1;
        r.unit_seq := r.seq;
        r.after_user := c.request_seq;
        r.is_user := r.role = 'user' and coalesce(r.metadata ->> 'injected', '') <> 'true';
        v_open := case when r.role = 'tool' then c.open_calls -> r.tool_call_id end;
        v_act := null;
        if v_open is not null and (v_open ->> 'seq')::bigint > coalesce(c.line_seq, 0) then
            r.unit_seq := (v_open ->> 'seq')::bigint;
            if v_open ? 'interim' then
                v_act := c.act_no + 1;
                update pycontext.message t set superseded_seq = r.seq
                where t.chat_id = c.chat_id and t.seq = (v_open ->> 'interim')::bigint and t.line_no = 0;
            elsif c.last_unit > r.unit_seq then
                v_act := c.act_no + 1;  -- a stand-in was shown in this place
            end if;
            if c.last_unit > r.unit_seq then
                c.straddles := c.straddles + int8multirange(int8range(r.unit_seq + 1, r.seq, '[]'));
            end if;
        end if;
        if v_open is not null then
            if r.metadata ->> 'pending' = 'true' then
                c.open_calls := jsonb_set(c.open_calls, array[r.tool_call_id],
                    v_open || jsonb_build_object('interim', r.seq, 'pending', true));
            else
                c.open_calls := c.open_calls - r.tool_call_id;
            end if;
        end if;
        if v_act is not null then
            c.act_no := v_act;
            insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details)
            values (c.chat_id, v_act, c.tenant, 'late_result', c.last_seq, jsonb_build_object('seq', r.seq, 'unit_seq', r.unit_seq));
        end if;

        -- what it is, and what it costs as it will be sent
        v_body := pycontext._content_text(r.content);
        r.has_fence := coalesce(pycontext._has_fence(v_body), false);
        r.is_plain := not (r.has_fence or (r.role = 'tool' and r.unit_seq = r.seq)
            or case when jsonb_typeof(r.content) = 'string' then not pycontext._has_text(v_body)
                else pycontext._is_blank(r.content) or jsonb_typeof(r.content) = 'array' and exists (
                    select from jsonb_array_elements(r.content) e
                    where pycontext._part_kind(e.value) = 'text' and not pycontext._has_text(pycontext._part_text(e.value))) end
                and not (r.content is null and r.calls > 0));
        v_rendered := case when r.is_plain then r.content else pycontext._rendered(r.content, r.has_fence,
            r.role = 'tool' and r.unit_seq = r.seq, r.tool_call_id, r.calls > 0) end;
        select * into k from pycontext._count_pieces(v_rendered, r.tool_calls,
            case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end, r.name, p.image_tokens);
        r.images := least(k.images, 32767);
        r.reasoning_tokens := pycontext._estimate_pieces(k.reasoning);
        v_count := m -> 'tokens';
        if v_count ->> 'encoding' = p.encoding and (v_count ->> 'count')::integer >= k.overhead
            and r.is_plain and r.reasoning_tokens = 0 then
            r.tokens := (v_count ->> 'count')::integer;
            r.encoding := p.encoding;
        else
            r.tokens := k.overhead + pycontext._estimate_pieces(k.texts) + r.reasoning_tokens;
            if v_count ->> 'encoding' is not null and v_count ->> 'encoding' <> p.encoding then
                insert into pycontext.token_count (chat_id, seq, encoding, tenant, tokens)
                values (c.chat_id, r.seq, v_count ->> 'encoding', c.tenant, (v_count ->> 'count')::integer)
                on conflict on constraint token_count_pk do nothing;
            end if;
        end if;
        r.frozen_tokens := r.tokens;
        r.stub_tokens := r.tokens;
        if r.role = 'tool' and r.unit_seq <> r.seq and r.tokens > 60 then
            v_is_error := coalesce(r.metadata ->> 'is_error', '') = 'true';
            -- a result told before is told as that: by its place, which stands for as long as this one does
            select t.seq into v_told
            from pycontext.message t
            where t.chat_id = c.chat_id and t.seq between greatest(coalesce(c.line_seq, 0), r.seq - 300) + 1 and r.seq - 1
                and t.line_no = 0 and t.gone_act is null and t.role = 'tool'
                and t.frozen_tokens = r.tokens and t.content = r.content
            order by t.seq limit 1;
            r.stub := case when v_told is null
                then pycontext._stub(coalesce(v_open ->> 'name', r.name), v_open ->> 'argument', coalesce(v_body, ''), v_is_error, r.seq)
                else pycontext._repeat_stub(coalesce(v_open ->> 'name', r.name), v_open ->> 'argument', coalesce(v_body, ''),
                    v_is_error, r.seq, v_told) end;
            r.stub_tokens := 14 + pycontext.estimate_tokens(r.stub)
                + case when r.name is null then 0 else 1 + pycontext.estimate_tokens(r.name) end;
        elsif r.calls > 0 and r.tokens > 200 then
            select jsonb_agg(jsonb_set(e.value, '{function,arguments}', to_jsonb(pycontext._shorten_arguments(
                e.value #>> '{function,arguments}', 80, r.seq))) order by e.ordinality)
            into r.stub_calls from jsonb_array_elements(r.tool_calls) with ordinality e;
            select * into k from pycontext._count_pieces(v_rendered, r.stub_calls, r.role, r.name, p.image_tokens);
            r.stub_tokens := 2 + k.overhead + pycontext._estimate_pieces(k.texts) + r.reasoning_tokens;
        elsif r.images > 0 then
            r.stub_tokens := r.tokens - r.images * (p.image_tokens - 16);
        end if;
        if r.stub_tokens > 0.8 * r.tokens then
            -- not worth another form of the row
            r.stub := null;
            r.stub_calls := null;
            r.stub_tokens := r.tokens;
        end if;

        -- the chat's running figures
        c.last_seq := r.seq;
        c.last_unit := greatest(c.last_unit, r.unit_seq);
        c.total_tokens := c.total_tokens + r.frozen_tokens;
        c.stub_total := c.stub_total + r.stub_tokens;
        c.live_tokens := c.live_tokens + r.tokens;
        r.running_total := c.total_tokens;
        r.running_stub := c.stub_total;
        r.at_act := c.act_no;
        if r.calls > 0 then
            select c.open_calls
                -- an id that is used again before its first call was answered: that one stays open for ever
                || coalesce(jsonb_object_agg((e.value ->> 'id') || '#' || (o.call ->> 'seq'), o.call)
                    filter (where o.call is not null), '{}')
                || jsonb_object_agg(e.value ->> 'id', jsonb_strip_nulls(jsonb_build_object(
                    'seq', r.seq, 'name', left(e.value #>> '{function,name}', 80),
                    'argument', pycontext._main_argument(e.value #>> '{function,arguments}'),
                    'pending', case when r.metadata ->> 'pending' = 'true' then true end)))
            into c.open_calls
            from jsonb_array_elements(r.tool_calls) e
            cross join lateral (select c.open_calls -> (e.value ->> 'id') as call) o;
        end if;
        if r.is_user then
            c.request_seq := r.seq;
        end if;
        if c.head_seq is null and r.is_user then
            c.head_seq := r.seq;
            c.head_to := r.seq;
            c.head_base := r.running_total - r.frozen_tokens;
            c.is_head_open := r.frozen_tokens < p.head_tokens;
        elsif c.head_seq is not null and c.is_head_open then
            if r.is_user or r.running_total - c.head_base > p.head_tokens then
                c.is_head_open := false;
            elsif not exists (select from jsonb_each(c.open_calls) o where (o.value ->> 'seq')::bigint >= c.head_seq) then
                c.head_to := r.seq;
            end if;
        end if;
        insert into pycontext.message values (r.*);
        return next r;
    end loop;
    update pycontext.chat t
    set last_seq = c.last_seq, last_unit = c.last_unit, act_no = c.act_no, total_tokens = c.total_tokens,
        stub_total = c.stub_total, live_tokens = c.live_tokens, request_seq = c.request_seq, head_seq = c.head_seq,
        head_to = c.head_to, head_base = c.head_base, is_head_open = c.is_head_open, open_calls = c.open_calls,
        straddles = c.straddles, updated_at = v_now
    where t.chat_id = c.chat_id;
end
$$;

-- One message; content is text, or parts as jsonb. Returns its row.
create or replace function pycontext.append_message(
    chat_id text, role text, content jsonb, tool_calls jsonb default null, tool_call_id text default null,
    name text default null, message_id text default null, created_at timestamptz default null, metadata jsonb default null)
returns pycontext.message
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select m from pycontext.append_messages(chat_id, jsonb_build_array(jsonb_build_object(
        'role', role, 'content', content, 'tool_calls', tool_calls, 'tool_call_id', tool_call_id, 'name', name,
        'message_id', message_id, 'created_at', created_at, 'metadata', metadata))) m
$$;

create or replace function pycontext.append_message(
    chat_id text, role text, content text default null, tool_calls jsonb default null, tool_call_id text default null,
    name text default null, message_id text default null, created_at timestamptz default null, metadata jsonb default null)
returns pycontext.message
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select pycontext.append_message(chat_id, role, to_jsonb(content), tool_calls, tool_call_id, name, message_id,
        created_at, metadata)
$$;
