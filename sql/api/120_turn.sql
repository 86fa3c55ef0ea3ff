-- The whole start of a turn in one round trip: get-or-create the chat, append the user's message, read the window.
-- message null resumes the turn as it stands. memory and context are rendered beside the newest request, never
-- stored. format: openai or anthropic. PCX02, PCX03, PCX05, PCX06.
create or replace function pycontext.start_turn(
    chat_id text, message jsonb default null, token_budget integer default null, tool_tokens integer default null,
    system_prompt text default null, profile text default null, context text default null, memory text default null,
    query_embedding real[] default null, format text default 'openai')
returns setof pycontext.turn_start
language plpgsql volatile security definer
set search_path = ''
as $$
declare
    r pycontext.turn_start;
    m pycontext.message;
    p pycontext.compaction_plan_row;
    s pycontext._window_state;
    v_rows pycontext.window_row[];
    v_is_new boolean;
    v_memory text;
begin
    if format is null or format not in ('openai', 'anthropic') then
        perform pycontext._raise('PCX02', 'unknown format', format('format is %L', format), 'use openai or anthropic');
    end if;
    if query_embedding is not null then
        raise exception using errcode = '0A000', message = 'recall by embedding is not installed',
            hint = 'pass memory as text, or leave query_embedding out';
    end if;
    v_is_new := not exists (select from pycontext.chat c where c.chat_id = start_turn.chat_id)
        and (message is not null or system_prompt is not null) and not exists (select from pycontext.source d where d.is_default);
    if v_is_new then
        perform pycontext.create_chat(chat_id, system_prompt, profile);
        r.prompt_differs := false;
    else
        r.prompt_differs := system_prompt is not null and system_prompt is distinct from (
            select q.content from pycontext.prompt q
            where q.chat_id = start_turn.chat_id order by q.act_no desc limit 1);
    end if;
    if tool_tokens is not null then
        update pycontext.chat c set tool_tokens = greatest(start_turn.tool_tokens, 0)
        where c.chat_id = start_turn.chat_id and c.tool_tokens <> greatest(start_turn.tool_tokens, 0);
    end if;
    if message is not null then
        if jsonb_typeof(message) = 'string' then
            message := jsonb_build_object('role', 'user', 'content', message);
        end if;
        select * into m from pycontext.append_messages(chat_id, jsonb_build_array(message));
        r.message_id := m.message_id;
        r.seq := m.seq;
    else
        s := pycontext._chat_state(chat_id, token_budget, null);
        r.seq := s.turn_seq;
        select t.message_id into r.message_id from pycontext._row_at(s, s.turn_seq) t;
    end if;
    -- answered: a reply without calls stands between this request and the next
    if s.source is not null then
        select t.role = 'assistant' and t.calls = 0 into r.is_answered
        from pycontext._thread_rows(chat_id, s.source, array[r.seq + 1], array[s.hi_seq], null, 1, true) t;
    else
        select exists (
            select from pycontext._stored_row t
            where t.chat_id = start_turn.chat_id and t.seq > r.seq and t.after_user = r.seq and t.role = 'assistant'
                and t.calls = 0 and t.line_no = 0 and t.gone_act is null) into r.is_answered;
    end if;
    r.is_answered := coalesce(r.is_answered, false);

    select q.* into p from pycontext.compaction_plan(chat_id, token_budget) q;
    if p.decision = 'prune' then
        perform pycontext.prune_chat(chat_id, token_budget);
    end if;
    r.decision := p.decision;
    r.reason := p.reason;
    r.token_budget := p.token_budget;
    select f.encoding into r.encoding
    from pycontext.profile f
    where f.profile = coalesce((select c.profile from pycontext.chat c where c.chat_id = start_turn.chat_id), 'default');
    -- what the request was read under: an exact replay stands on it
    if message is not null and m.read_budget is null then
        update pycontext.message t
        set read_budget = r.token_budget, at_act = c.act_no
        from pycontext.chat c
        where c.chat_id = t.chat_id and t.chat_id = start_turn.chat_id and t.seq = m.seq and t.line_no = 0;
    end if;
    v_memory := nullif(concat_ws(E'\n\n', nullif(memory, ''), nullif(context, '')), '');
    v_rows := pycontext._window_array(chat_id, token_budget, null);
    r.messages := case when format = 'openai'
        then pycontext._openai_of(v_rows, v_memory, pycontext._strict_roles(chat_id))
        else pycontext._anthropic_of(v_rows, v_memory) end;
    select 3 + coalesce(sum(w.tokens), 0), bool_or(w.section = 'omitted' or w.is_shortened)
    into r.window_tokens, r.is_degraded
    from unnest(v_rows) w;
    return next r;
end
$$;
