-- The budget of rows beside recalled memory: what memory takes over its reserve is taken off the profile's budget. A budget
-- that was given is for the rows alone, and stays.
create or replace function pycontext._budget_beside(
    chat_id text, token_budget integer, p pycontext.profile, memory_tokens integer)
returns integer
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_reserve integer := least(p.memory_tokens, p.context_window / 8);
    v_memory integer;
    v_tools integer;
begin
    select ceil(memory_tokens * c.token_scale), c.tool_tokens into v_memory, v_tools
    from pycontext.chat c where c.chat_id = _budget_beside.chat_id;
    v_memory := coalesce(v_memory, ceil(memory_tokens * p.token_scale));
    if token_budget is not null or v_memory <= v_reserve then
        return token_budget;
    end if;
    return greatest(pycontext._budget(p, coalesce(v_tools, 0), 1) + v_reserve - v_memory, 1);
end
$$;

-- Anthropic's cache marks for the rows of a window. Reasoning of the turn before the newest request is left out from now on.
create or replace function pycontext._marks(chat_id text, rows pycontext.window_row[], has_memory boolean)
returns integer[]
language sql stable
as $$
    select pycontext._cache_marks(rows, has_memory, (
        select min(r.seq)
        from (
            select max(w.seq) filter (where w.n = 2) as from_seq, max(w.seq) filter (where w.n = 1) as to_seq
            from (
                select t.seq, row_number() over (order by t.ordinal desc) as n
                from unnest(rows) t where t.role = 'user' and t.kind = 'message' and t.section <> 'omitted') w
            having count(*) > 1) q
        cross join lateral pycontext._thread_rows(chat_id, pycontext._source_of(chat_id),
            array[q.from_seq], array[q.to_seq]) r
        where r.reasoning_tokens > 0 and r.seq < q.to_seq))
$$;

-- Whether a row is a reply that its turn ends with: it calls nothing, and Anthropic did not pause in it (pause_turn).
create or replace function pycontext._is_final(role text, calls integer, content jsonb, metadata jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select role = 'assistant' and calls = 0 and coalesce(metadata ->> 'stop_reason', '') <> 'pause_turn'
        and not pycontext._is_paused(content)
$$;

-- The reply to a request, the newest one: a final row that is the request's by its id (what a turn adds is
-- called <message_id>/…), wherever another tab's turn may stand, or by its place, before the next request (to_seq).
create or replace function pycontext._reply_to(chat_id text, seq bigint, message_id text, to_seq bigint)
returns setof pycontext._stored_row
language sql stable
as $$
    select q.*
    from (
        select t.* from pycontext._stored_row t
        where t.chat_id = _reply_to.chat_id and t.message_id > _reply_to.message_id || '/'
            and t.message_id < _reply_to.message_id || '0' and strpos(substr(t.message_id, length(_reply_to.message_id) + 2), '/') = 0
        union all
        select t.* from pycontext._stored_row t
        where t.chat_id = _reply_to.chat_id and t.seq > _reply_to.seq and t.seq < coalesce(to_seq, 9223372036854775807)
            and t.after_user = _reply_to.seq
            and not exists (
                select from pycontext.message x
                where x.chat_id = t.chat_id and x.message_id = substring(t.message_id from '^(.+)/[^/]*$')
                    and x.role = 'user' and x.seq <> _reply_to.seq)) q
    where pycontext._is_final(q.role, q.calls, q.content, q.metadata) and q.line_no = 0 and q.gone_act is null
    order by q.seq desc limit 1
$$;

comment on function pycontext._reply_to(text, bigint, text, bigint) is
    'Private. The reply to a request: by its id, else by its place.';

-- What a turn writes beside its message, for it reads with the rights of whoever calls it.
create or replace function pycontext._set_tool_tokens(chat_id text, tool_tokens integer)
returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update pycontext.chat c set tool_tokens = greatest(_set_tool_tokens.tool_tokens, 0)
    where c.chat_id = _set_tool_tokens.chat_id and c.tool_tokens <> greatest(_set_tool_tokens.tool_tokens, 0)
$$;

comment on function pycontext._set_tool_tokens(text, integer) is 'Private. Notes what a turn''s tools take.';

-- What the request was read under: an exact replay stands on it.
create or replace function pycontext._note_budget(chat_id text, seq bigint, token_budget integer)
returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update pycontext.message t
    set read_budget = token_budget, read_excess = nullif(c.excess_tokens, 0), at_act = c.act_no
    from pycontext.chat c
    where c.chat_id = t.chat_id and t.chat_id = _note_budget.chat_id and t.seq = _note_budget.seq and t.line_no = 0
        and t.read_budget is null
$$;

comment on function pycontext._note_budget(text, bigint, integer) is 'Private. Notes what a request was read under.';

-- What record_usage compares a provider's count with.
create or replace function pycontext._note_read(chat_id text, seq bigint, tokens integer)
returns void
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update pycontext.chat c
    set read_seq = _note_read.seq, read_act = c.act_no, read_tokens = tokens + c.tool_tokens
    where c.chat_id = _note_read.chat_id and (c.read_seq, c.read_act, c.read_tokens)
        is distinct from (_note_read.seq, c.act_no, tokens + c.tool_tokens)
$$;

comment on function pycontext._note_read(text, bigint, integer) is 'Private. Notes what a turn has read.';

-- The whole start of a turn in one round trip: get-or-create the chat, append the user's message, read the window.
-- message null resumes the turn as it stands (of request_id, the newest where that is null); one that is sent again after
-- others came is read as of then. A message without an id takes request_id. It reads with its caller's rights, as
-- working_window does, and acts with the installer's. memory, context and what is recalled
-- (recall, or a query_embedding, of embedding_model) are rendered beside the newest request, never stored. format: openai,
-- anthropic, responses, or all of them by name. PCX02, PCX03, PCX05, PCX06, PCX13.
create or replace function pycontext.start_turn(
    chat_id text, message jsonb default null, token_budget integer default null, tool_tokens integer default null,
    system_prompt text default null, profile text default null, context text default null, memory text default null,
    query_embedding real[] default null, format text default 'openai', recall boolean default false,
    embedding_model text default null, request_id text default null)
returns setof pycontext.turn_start
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    r pycontext.turn_start;
    m pycontext.message;
    p pycontext.compaction_plan_row;
    s pycontext._window_state;
    v_rows pycontext.window_row[];
    f pycontext.profile;
    v_is_new boolean;
    v_source text := (select d.source from pycontext.source d where d.is_default);
    v_query text;
    v_memory text;
    v_next bigint;
    v_as_of text;
    v_memory_tokens integer := 0;
    v_openai jsonb;
    v_anthropic jsonb;
    v_responses jsonb;
begin
    if format is null or format not in ('openai', 'anthropic', 'responses', 'all') then
        perform pycontext._raise('PCX02', 'unknown format', format('format is %L', format),
            'use openai, anthropic or responses, or all for the three of them by name');
    end if;
    v_is_new := not exists (select from pycontext.chat c where c.chat_id = start_turn.chat_id)
        and case when v_source is null then message is not null or system_prompt is not null
            else message is null and (system_prompt is not null or profile is not null) end;
    if v_is_new then
        if v_source is not null then
            perform pycontext._chat_bounds(chat_id);  -- PCX01 where the source has no row of it
        end if;
        perform pycontext.create_chat(chat_id, system_prompt, profile, source => v_source);
        r.prompt_differs := false;
    else
        r.prompt_differs := system_prompt is not null and system_prompt is distinct from (
            select q.content from pycontext.prompt q
            where q.chat_id = start_turn.chat_id order by q.act_no desc limit 1);
    end if;
    if tool_tokens is not null then
        perform pycontext._set_tool_tokens(chat_id, tool_tokens);
    end if;
    if message is not null then
        if jsonb_typeof(message) = 'string' then
            message := jsonb_build_object('role', 'user', 'content', message);
        end if;
        if request_id is not null and nullif(message ->> 'message_id', '') is null and jsonb_typeof(message) = 'object' then
            message := message || jsonb_build_object('message_id', request_id);
        end if;
        select * into m from pycontext.append_messages(chat_id, jsonb_build_array(message));
        r.message_id := m.message_id;
        r.seq := m.seq;
        v_query := pycontext._content_text(m.content);
    else
        s := pycontext._chat_state(chat_id, token_budget, null);
        if request_id is not null then
            select t.seq, t.message_id into r.seq, r.message_id
            from pycontext._thread_rows(chat_id, s.source, array[pycontext._origin(s.source)], array[4611686018427387904],
                message_id => request_id) t;
            if not found then
                perform pycontext._raise('PCX02', 'no such request in this chat', format('chat_id is %L, request_id is %L',
                    chat_id, request_id), 'pass the request''s own id, or its message with it, or neither to resume the newest');
            end if;
        end if;
        if s.source is not null then
            -- a line that this request was not there for, and who else would notice?
            if s.line_origin = 'compaction' and r.seq <= s.line_seq and r.seq is distinct from s.request_seq
                and (r.seq between s.head_from and s.head_to) is not true then
                select min(t.seq) into s.stale_seq from pycontext._stale_lines(chat_id, r.seq) t;
            end if;
            if s.stale_seq is not null then
                perform pycontext._drop_lines(chat_id, s.stale_seq);
                s := pycontext._chat_state(chat_id, token_budget, null);
            end if;
        end if;
        if request_id is null then
            r.seq := s.turn_seq;
            select t.message_id into r.message_id from pycontext._row_at(s, s.turn_seq) t;
        end if;
        if recall or query_embedding is not null then
            select pycontext._content_text(t.content) into v_query
            from pycontext._thread_rows(chat_id, s.source, array[r.seq], array[r.seq], null, 1, true) t;
        end if;
    end if;
    if s.source is not null then
        if r.seq < s.turn_seq then
            select t.seq into v_next
            from pycontext._thread_rows(chat_id, s.source, array[r.seq + 1], array[s.hi_seq], null, 1, users_only => true) t;
        end if;
        -- an adopted chat: the newest row before the next request
        select pycontext._is_final(t.role, t.calls, t.content, t.metadata), pycontext._content_text(t.content)
        into r.is_answered, r.reply
        from pycontext._thread_rows(chat_id, s.source, array[r.seq + 1], array[coalesce(v_next - 1, s.hi_seq)], null, 1, true) t;
    else
        if m.gone_act is null then
            select t.seq into v_next
            from pycontext._stored_row t
            where t.chat_id = start_turn.chat_id and t.seq > r.seq and t.line_no = 0 and t.is_user and t.gone_act is null
            order by t.seq limit 1;
        end if;
        if message is not null and v_next is not null then
            -- sent again after others came: it reads what it read, to where the next request stands
            select t.message_id into v_as_of
            from pycontext._stored_row t
            where t.chat_id = start_turn.chat_id and t.seq < v_next and t.line_no = 0 and t.gone_act is null
            order by t.seq desc limit 1;
        end if;
        select true, pycontext._content_text(t.content) into r.is_answered, r.reply
        from pycontext._reply_to(chat_id, r.seq, r.message_id, v_next) t
        -- resumed, it goes on from a result that came after the reply to a call before it: an approval, say
        where message is not null or v_next is not null or not exists (
            select from pycontext._stored_row x
            where x.chat_id = start_turn.chat_id and x.seq > t.seq and x.line_no = 0 and x.gone_act is null and x.role = 'tool'
                and x.unit_seq > r.seq and x.unit_seq < t.seq and coalesce(x.metadata ->> 'pending', '') <> 'true'
                and not exists (
                    select from pycontext.message q
                    where q.chat_id = x.chat_id and q.message_id = substring(x.message_id from '^(.+)/[^/]*$')
                        and q.role = 'user' and q.seq <> r.seq));
    end if;
    r.is_answered := coalesce(r.is_answered, false);
    if not r.is_answered then
        r.reply := null;
    end if;
    if recall or query_embedding is not null then
        memory := nullif(concat_ws(E'\n\n', nullif(memory, ''), pycontext._memory_text(
            chat_id, v_query, query_embedding, embedding_model)), '');
    end if;
    r.memory := memory;
    v_memory := nullif(concat_ws(E'\n\n', nullif(memory, ''), nullif(context, '')), '');

    select t.* into f
    from pycontext.profile t
    where t.profile = coalesce((select c.profile from pycontext.chat c where c.chat_id = start_turn.chat_id), 'default');
    if pycontext._has_text(v_memory) then
        v_memory_tokens := 4 + pycontext.estimate_tokens(pycontext._fenced('memory-context', v_memory));
    end if;
    token_budget := pycontext._budget_beside(chat_id, token_budget, f, v_memory_tokens);
    select q.* into p from pycontext.compaction_plan(chat_id, token_budget) q;
    if p.decision = 'prune' then
        perform pycontext.prune_chat(chat_id, token_budget);
    end if;
    r.decision := p.decision;
    r.reason := p.reason;
    r.token_budget := p.token_budget;
    r.encoding := f.encoding;
    r.token_scale := coalesce((select c.token_scale from pycontext.chat c where c.chat_id = start_turn.chat_id), f.token_scale);
    if message is not null and m.read_budget is null then
        perform pycontext._note_budget(chat_id, m.seq, r.token_budget);
    end if;
    -- as of the request itself the budget is what it was read under, where that is no more than there is now
    v_rows := pycontext._window_array(chat_id,
        case when v_as_of = m.message_id and m.read_budget <= p.token_budget then null else token_budget end, v_as_of);
    if s.source is not null and r.seq <= s.hi_seq and (r.is_answered and v_next is not null
            or not exists (select from unnest(v_rows) w where w.seq = r.seq)) then
        -- answered, told in a summary, or left out: a request is read as of then, up to where the next one stands
        select t.message_id into v_as_of
        from pycontext._thread_rows(chat_id, s.source, array[r.seq], array[coalesce(v_next - 1, s.hi_seq)], null, 1, true) t;
        v_rows := pycontext._window_array(chat_id, token_budget, v_as_of);
    end if;
    if format in ('openai', 'all') then
        v_openai := pycontext._openai_of(v_rows, v_memory, f.strict_roles);
    end if;
    if format in ('anthropic', 'all') then
        v_anthropic := pycontext._anthropic_of(v_rows, v_memory, pycontext._marks(chat_id, v_rows, v_memory_tokens > 0),
            pycontext._failed(chat_id, v_rows));
    end if;
    if format in ('responses', 'all') then
        v_responses := pycontext._responses_of(v_rows, v_memory, f.strict_roles, pycontext._failed(chat_id, v_rows));
    end if;
    r.messages := case format when 'all'
        then jsonb_build_object('openai', v_openai, 'anthropic', v_anthropic, 'responses', v_responses)
        else coalesce(v_openai, v_anthropic, v_responses) end;
    select 3 + coalesce(sum(w.tokens), 0), pycontext._is_degraded(chat_id, v_rows), coalesce(max(w.seq), 0)
    into r.window_tokens, r.is_degraded, r.read_seq
    from unnest(v_rows) w;
    perform pycontext._note_read(chat_id, r.read_seq, r.window_tokens + v_memory_tokens);
    return next r;
end
$$;
