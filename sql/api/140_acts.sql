-- The named acts that change a chat. Each locks the chat's row first, raises its act_no, writes a row into act, and
-- leaves the chat's running figures as the live rows make them. Those that take something back raise edit_no too:
-- a summary planned before them is refused (PCX07).

comment on table pycontext.pin is
    'Messages that were pinned. A row stays when its pin is taken off (gone_act), so that a replay finds it.';
comment on column pycontext.pin.chat_id is 'The chat.';
comment on column pycontext.pin.seq is 'Seq of the pinned message.';
comment on column pycontext.pin.at_act is 'The act that pinned it; the smaller, the older the pin.';
comment on column pycontext.pin.gone_act is 'The act that took the pin off, or set its message aside; null = it is live.';
comment on column pycontext.pin.unit_seq is 'The message''s unit: what is shown with it.';
comment on column pycontext.pin.to_seq is 'The unit''s newest row when it was pinned.';
comment on column pycontext.pin.tenant is 'The chat''s tenant.';
comment on column pycontext.pin.message_id is 'The message''s own id.';
comment on column pycontext.pin.created_at is 'When it was pinned.';
comment on column pycontext.chat.pins is 'How many live pins the chat has.';
comment on column pycontext.message.redacted_act is
    'The act that erased this row''s content, or an erased row''s words in this line; null = it is as it was written.';

create or replace view pycontext.erased_row as
select null::text as relation, null::bigint as rows
where false;
comment on view pycontext.erased_row is 'Row type of delete_chat and forget_owner: how many rows of a relation are gone.';
comment on column pycontext.erased_row.relation is 'The relation, without its schema.';
comment on column pycontext.erased_row.rows is 'How many of its rows were deleted.';

-- The chat, locked; PCX09 where the product's own table holds its messages, with what to do there.
create or replace function pycontext._lock_native(chat_id text, hint text)
returns pycontext.chat
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
begin
    if c.source is not null then
        perform pycontext._raise('PCX09', 'this chat lives in your own table',
            format('chat_id is %L, source is %L', chat_id, c.source), hint);
    end if;
    return c;
end
$$;

-- The newest seq the chat knows of; 0 where there is none.
create or replace function pycontext._newest_seq(c pycontext.chat)
returns bigint
language sql stable
as $$
    select case when c.source is null then c.last_seq else coalesce((
        select r.seq from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)],
            array[4611686018427387904], null, 1, true) r), 0) end
$$;

-- A live message by its id, or PCX02.
create or replace function pycontext._message_of(c pycontext.chat, message_id text)
returns pycontext._thread_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    r pycontext._thread_row;
begin
    select t.* into r
    from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[4611686018427387904], null,
        1, true, message_id => coalesce(_message_of.message_id, '')) t;
    if r.seq is null then
        perform pycontext._no_such_message(c.chat_id, message_id);
    end if;
    return r;
end
$$;

-- Writes the act down; returns the chat with its numbers raised.
create or replace function pycontext._log_act(c pycontext.chat, act text, is_edit boolean, details jsonb)
returns pycontext.chat
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    c.act_no := c.act_no + 1;
    c.edit_no := c.edit_no + is_edit::integer;
    c.updated_at := v_now;
    insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details, created_at)
    values (c.chat_id, c.act_no, c.tenant, act, pycontext._newest_seq(c), details, v_now);
    update pycontext.chat t
    set act_no = c.act_no, edit_no = c.edit_no, updated_at = v_now
    where t.chat_id = c.chat_id;
    return c;
end
$$;

-- Calls that still wait for a result, as chat.open_calls keeps them: of the rows after from_seq, by the results there.
create or replace function pycontext._open_calls(chat_id text, from_seq bigint, to_seq bigint)
returns jsonb
language sql stable
as $$
    with live as materialized (
        select r.seq, r.unit_seq, r.role, r.calls, r.tool_call_id, r.tool_calls,
            coalesce(r.metadata ->> 'pending', '') = 'true' as is_pending
        from pycontext._thread_rows(_open_calls.chat_id, null, array[from_seq], array[to_seq]) r
        where r.calls > 0 or r.role = 'tool'
    ), told as (
        select t.unit_seq, t.tool_call_id, bool_or(not t.is_pending) as is_closed, max(t.seq) as interim
        from live t
        where t.role = 'tool' and t.unit_seq <> t.seq
        group by t.unit_seq, t.tool_call_id
    ), called as (
        -- an id used again while its call is open leaves that one open for ever, under the id and its seq
        select case when row_number() over (partition by e.value ->> 'id' order by t.seq desc) = 1 then e.value ->> 'id'
                else format('%s#%s', e.value ->> 'id', t.seq) end as key,
            t.seq, t.is_pending, u.is_closed, u.interim, left(e.value #>> '{function,name}', 80) as name,
            pycontext._main_argument(e.value #>> '{function,arguments}') as argument
        from live t
        cross join lateral jsonb_array_elements(t.tool_calls) e
        left join told u on u.unit_seq = t.seq and u.tool_call_id = e.value ->> 'id'
        where t.calls > 0
    )
    select coalesce(jsonb_object_agg(k.key, jsonb_strip_nulls(jsonb_build_object('seq', k.seq, 'name', k.name,
        'argument', k.argument, 'pending', case when k.is_pending or k.interim is not null then true end,
        'interim', k.interim))), '{}')
    from called k
    where k.is_closed is not true
$$;

-- The head as appends would have left it: whole exchanges from the first real user message on, within the limit.
create or replace function pycontext._walk_head(c pycontext.chat, hi_seq bigint, head_tokens integer)
returns pycontext.chat
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    r record;
    v_from bigint := c.head_seq;
    v_open text[] := '{}';
    v_calls text[];
begin
    c.head_to := null;
    c.head_base := 0;
    c.is_head_open := true;
    <<walk>>
    while v_from <= hi_seq loop
        for r in
            select t.seq, t.role, t.is_user, t.calls, t.tool_call_id, t.tool_calls, t.metadata, t.running_total,
                t.frozen_tokens
            from pycontext._thread_rows(c.chat_id, null, array[v_from], array[least(v_from + 255, hi_seq)], null, null, true) t
            order by t.seq
        loop
            if r.calls > 0 then
                v_calls := array(select e.value ->> 'id' from jsonb_array_elements(r.tool_calls) e);
                v_open := array(select case when o.id = any (v_calls) then o.id || '#' else o.id end
                    from unnest(v_open) o (id)) || v_calls;
            elsif r.role = 'tool' and coalesce(r.metadata ->> 'pending', '') <> 'true' then
                v_open := array_remove(v_open, r.tool_call_id);
            end if;
            if r.seq = c.head_seq then
                c.head_to := r.seq;
                c.head_base := r.running_total - r.frozen_tokens;
                c.is_head_open := r.frozen_tokens < head_tokens;
            elsif r.is_user or r.running_total - c.head_base > head_tokens then
                c.is_head_open := false;
            elsif v_open = '{}' then
                c.head_to := r.seq;
            end if;
            exit walk when not c.is_head_open;
        end loop;
        v_from := v_from + 256;
    end loop;
    return c;
end
$$;

-- The first real user message after a place; null where there is none.
create or replace function pycontext._first_user(chat_id text, after_seq bigint, hi_seq bigint)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_seq bigint;
    v_from bigint := after_seq + 1;
    v_step bigint := 64;
begin
    while v_seq is null and v_from <= hi_seq loop
        select min(r.seq) into v_seq
        from pycontext._thread_rows(_first_user.chat_id, null, array[v_from], array[least(v_from + v_step - 1, hi_seq)]) r
        where r.is_user;
        v_from := v_from + v_step;
        v_step := v_step * 2;
    end loop;
    return v_seq;
end
$$;

-- Brings the chat's running figures in line with its live rows, after an act that set rows aside, erased or dropped them.
create or replace function pycontext._refresh_chat(chat_id text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    l record;
    n record;
    f record;
    v_reset bigint;
    v_head_tokens integer;
begin
    select t.* into c from pycontext.chat t where t.chat_id = _refresh_chat.chat_id;
    select m.seq, m.line_no into l
    from pycontext.message m
    where m.chat_id = c.chat_id and m.line_no > 0 and m.gone_act is null
    order by m.seq desc, m.origin = 'reset' desc, m.line_no desc limit 1;
    c.line_seq := l.seq;
    c.line_no := l.line_no;
    select coalesce(max(m.seq), 0) into v_reset
    from pycontext.message m
    where m.chat_id = c.chat_id and m.line_no > 0 and m.gone_act is null and m.origin = 'reset';
    select count(*) into c.pins from pycontext.pin i where i.chat_id = c.chat_id and i.gone_act is null;
    if c.source is null then
        select r.seq, r.unit_seq, r.running_total, r.running_stub, r.is_user, r.after_user into n
        from pycontext._thread_rows(c.chat_id, null, array[1::bigint], array[c.last_seq], null, 1, true) r;
        c.total_tokens := coalesce(n.running_total, 0);
        c.stub_total := coalesce(n.running_stub, 0);
        c.last_unit := coalesce((
            select r.unit_seq from pycontext._stored_row r
            where r.chat_id = c.chat_id and r.gone_act is null and r.line_no = 0
            order by r.unit_seq desc, r.seq desc limit 1), 0);
        c.request_seq := case when n.is_user then n.seq else n.after_user end;
        if c.request_seq <= v_reset then
            c.request_seq := null;
        end if;
        select coalesce(sum(p.tokens), 0) as live, coalesce(sum(greatest(p.tokens - p.frozen_tokens, 0)), 0) as excess,
            coalesce(range_agg(int8range(p.unit_seq + 1, p.seq, '[]'))
                filter (where p.seq <> p.unit_seq and p.before_unit > p.unit_seq), '{}') as straddles
        into f
        from (
            select r.seq, r.unit_seq, r.tokens, r.frozen_tokens, max(r.unit_seq) over (
                order by r.seq rows between unbounded preceding and 1 preceding) as before_unit
            from pycontext._thread_rows(c.chat_id, null, array[coalesce(c.line_seq, 0) + 1], array[c.last_seq]) r) p;
        c.live_tokens := f.live;
        c.excess_tokens := f.excess + pycontext._kept_excess(c.chat_id, c.line_seq, c.line_no);
        c.straddles := f.straddles;
        -- calls before the line can't be answered any more, and stay as they are
        c.open_calls := coalesce((
            select jsonb_object_agg(o.key, case when (o.value ->> 'interim')::bigint > coalesce(n.seq, 0)
                then o.value - 'interim' else o.value end)
            from jsonb_each(c.open_calls) o
            where (o.value ->> 'seq')::bigint <= least(coalesce(c.line_seq, 0), n.seq)), '{}')
            || pycontext._open_calls(c.chat_id, coalesce(c.line_seq, 0) + 1, c.last_seq);
        if v_reset <> c.reset_seq then
            c.head_seq := pycontext._first_user(c.chat_id, v_reset, coalesce(n.seq, 0));
        elsif c.head_seq > coalesce(n.seq, 0) then
            c.head_seq := null;
        end if;
        select p.head_tokens into v_head_tokens from pycontext.profile p where p.profile = c.profile;
        c := pycontext._walk_head(c, coalesce(n.seq, 0), v_head_tokens);
        if c.prune_unit > coalesce(n.seq, 0) then
            c.prune_unit := null;
            c.prune_total := null;
            c.prune_stub := null;
            c.prune_request := null;
            update pycontext.act a set details = coalesce(a.details, '{}') || '{"prune_unit": null}'
            where a.chat_id = c.chat_id and a.act_no = c.act_no;
        end if;
    end if;
    update pycontext.chat t
    set line_seq = c.line_seq, line_no = c.line_no, reset_seq = v_reset, pins = c.pins, total_tokens = c.total_tokens,
        stub_total = c.stub_total, last_unit = c.last_unit, request_seq = c.request_seq, live_tokens = c.live_tokens,
        excess_tokens = c.excess_tokens, straddles = c.straddles, open_calls = c.open_calls, head_seq = c.head_seq,
        head_to = c.head_to, head_base = c.head_base, is_head_open = c.is_head_open, prune_unit = c.prune_unit,
        prune_total = c.prune_total, prune_stub = c.prune_stub, prune_request = c.prune_request
    where t.chat_id = c.chat_id;
end
$$;

-- Edit or regenerate: every row after a message is set aside (kept, no longer in the thread), and the lines placed
-- after it; '' sets the whole thread aside. Returns what was set aside. PCX01, PCX02, PCX09.
create or replace function pycontext.rewind_chat(chat_id text, to_message_id text)
returns setof pycontext.thread_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_native(chat_id,
        'take the rows back in your own table, then: select pycontext.source_changed(chat_id, message_id)');
    r pycontext._thread_row;
    v_to bigint := 0;
begin
    if to_message_id is distinct from '' then
        r := pycontext._message_of(c, to_message_id);
        v_to := r.seq;
    end if;
    if not exists (
        select from pycontext.message m where m.chat_id = c.chat_id and m.seq > v_to and m.gone_act is null) then
        return;
    end if;
    c := pycontext._log_act(c, 'rewound', true, jsonb_build_object('to_seq', v_to));
    update pycontext.message m set gone_act = c.act_no
    where m.chat_id = c.chat_id and m.seq > v_to and m.gone_act is null;
    update pycontext.pin i set gone_act = c.act_no
    where i.chat_id = c.chat_id and i.seq > v_to and i.gone_act is null;
    perform pycontext._rewind_facts(c.chat_id, v_to);
    perform pycontext._refresh_chat(c.chat_id);
    return query
    select m.seq, m.message_id, m.kind, m.origin, m.role, m.content, m.tool_calls, m.tool_call_id, m.name, m.tokens,
        m.encoding is null, m.created_at, m.metadata, m.summary
    from pycontext.message m
    where m.chat_id = c.chat_id and m.seq > v_to and m.gone_act = c.act_no
    order by m.seq, m.line_no;
end
$$;
comment on function pycontext.rewind_chat(text, text) is
    'Edit or regenerate: sets aside every row after to_message_id (kept, no longer in the thread), with the lines placed '
    'after it; '''' sets the whole thread aside. Returns what was set aside; nothing where nothing follows.';

-- A new system prompt from now on; null or blank: none. Returns the act_no it holds from. PCX01.
create or replace function pycontext.set_system_prompt(chat_id text, system_prompt text)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    v_prompt text := case when pycontext._has_text(system_prompt) then system_prompt else '' end;
    v_old record;
    v_tokens integer := 0;
    v_now timestamptz := clock_timestamp();
begin
    select q.act_no, q.content into v_old
    from pycontext.prompt q where q.chat_id = c.chat_id order by q.act_no desc limit 1;
    if coalesce(v_old.content, '') = v_prompt then
        return coalesce(v_old.act_no, c.act_no);
    end if;
    c := pycontext._log_act(c, 'prompted', false, null);
    if v_prompt <> '' then
        v_tokens := 4 + pycontext.estimate_tokens(v_prompt);
    end if;
    insert into pycontext.prompt (chat_id, act_no, tenant, content, tokens, frozen_tokens, encoding, created_at)
    values (c.chat_id, c.act_no, c.tenant, v_prompt, v_tokens, v_tokens, case when v_prompt = '' then (
        select p.encoding from pycontext.profile p where p.profile = c.profile) end, v_now);
    return c.act_no;
end
$$;
comment on function pycontext.set_system_prompt(text, text) is
    'Gives the chat a new system prompt from its next window on; null or blank: none. A replay reads the one of its day. '
    'The same prompt again is no act. Returns the act_no it holds from.';

-- What is wrong with a profile, a sentence each; null = nothing.
create or replace function pycontext._profile_faults(p pycontext.profile)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_budget integer := pycontext._budget(p, 0, p.token_scale);
    v_faults text;
begin
    select string_agg(f.fault, '; ' order by f.n) into v_faults
    from (values
        (1, coalesce(p.encoding, '') in ('o200k_base', 'cl100k_base'),
            format('encoding is %L, not o200k_base or cl100k_base', p.encoding)),
        (2, p.token_scale between 0.5 and 4, format('token_scale is %s, not 0.5 to 4', p.token_scale)),
        (3, p.context_window between 1000 and 100000000,
            format('context_window is %s, not 1,000 to 100,000,000', p.context_window)),
        (4, p.response_reserve >= 0, format('response_reserve is %s', p.response_reserve)),
        (5, p.memory_tokens >= 0, format('memory_tokens is %s', p.memory_tokens)),
        (6, v_budget > 0, format('the budget is %s', v_budget)),
        (7, p.head_tokens >= 0 and p.head_tokens <= v_budget / 2,
            format('head_tokens is %s, not 0 to half the budget of %s', p.head_tokens, v_budget)),
        (8, p.tail_ratio between 0.05 and 0.6, format('tail_ratio is %s, not 0.05 to 0.6', p.tail_ratio)),
        (9, p.summary_ratio between 0.005 and 0.3, format('summary_ratio is %s, not 0.005 to 0.3', p.summary_ratio)),
        (10, p.target_ratio between 0.1 and 0.9, format('target_ratio is %s, not 0.1 to 0.9', p.target_ratio)),
        (11, p.tail_ratio < p.target_ratio,
            format('tail_ratio %s is not below target_ratio %s', p.tail_ratio, p.target_ratio)),
        (12, p.trigger_ratio > p.target_ratio and p.trigger_ratio <= 1,
            format('trigger_ratio %s is not above target_ratio %s and at most 1', p.trigger_ratio, p.target_ratio)),
        (13, p.trigger_tokens is null or p.trigger_tokens > p.target_ratio * v_budget,
            format('trigger_tokens %s is not above the target, which is %s (target_ratio of the budget of %s)',
                p.trigger_tokens, floor(p.target_ratio * v_budget), v_budget)),
        (14, p.image_tokens between 1 and 100000, format('image_tokens is %s, not 1 to 100,000', p.image_tokens)),
        (15, coalesce(p.compaction_mode, '') in ('auto', 'warn', 'off'),
            format('compaction_mode is %L, not auto, warn or off', p.compaction_mode)),
        (16, p.summarizer_window between 1000 and 100000000,
            format('summarizer_window is %s, not 1,000 to 100,000,000', p.summarizer_window)),
        (17, p.settle_seconds between 0 and 86400, format('settle_seconds is %s, not 0 to 86,400', p.settle_seconds)),
        (18, coalesce(p.flush_mode, '') in ('required', 'optional', 'off'),
            format('flush_mode is %L, not required, optional or off', p.flush_mode))
    ) f (n, is_right, fault)
    where f.is_right is not true;
    return v_faults;
end
$$;

-- Makes or alters a profile; what is left out keeps its value, or is the default's. Checked before anything is
-- written: PCX06. trigger_tokens 0 takes that limit off.
create or replace function pycontext.set_profile(
    profile text, encoding text default null, token_scale numeric default null, context_window integer default null,
    response_reserve integer default null, memory_tokens integer default null, head_tokens integer default null,
    tail_ratio numeric default null, summary_ratio numeric default null, trigger_ratio numeric default null,
    trigger_tokens integer default null, target_ratio numeric default null, image_tokens integer default null,
    strict_roles boolean default null, compaction_mode text default null, summarizer_window integer default null,
    settle_seconds integer default null, flush_mode text default null)
returns pycontext.profile
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    o pycontext.profile;
    p pycontext.profile;
    v_budget integer;
    v_faults text;
    v_chats bigint;
    v_rows bigint;
begin
    if profile is null or profile !~ '\S' then
        perform pycontext._raise('PCX06', 'a profile needs a name', format('profile is %L', profile), 'pass a name');
    end if;
    select t.* into o from pycontext.profile t where t.profile = set_profile.profile;
    p := o;
    p.profile := profile;
    p.tenant := coalesce(o.tenant, pycontext._tenant(null));
    p.encoding := coalesce(encoding, o.encoding, 'o200k_base');
    p.token_scale := coalesce(token_scale, o.token_scale, 1.0);
    p.context_window := coalesce(context_window, o.context_window, 128000);
    p.response_reserve := coalesce(response_reserve, o.response_reserve, 8192);
    p.memory_tokens := coalesce(memory_tokens, o.memory_tokens, 2000);
    p.tail_ratio := coalesce(tail_ratio, o.tail_ratio, 0.25);
    p.summary_ratio := coalesce(summary_ratio, o.summary_ratio, 0.05);
    p.trigger_ratio := coalesce(trigger_ratio, o.trigger_ratio, 0.75);
    p.trigger_tokens := nullif(coalesce(trigger_tokens, o.trigger_tokens, 0), 0);
    p.target_ratio := coalesce(target_ratio, o.target_ratio, 0.40);
    p.image_tokens := coalesce(image_tokens, o.image_tokens, 1000);
    p.strict_roles := coalesce(strict_roles, o.strict_roles, false);
    p.compaction_mode := coalesce(compaction_mode, o.compaction_mode, 'auto');
    p.summarizer_window := coalesce(summarizer_window, o.summarizer_window, 32000);
    p.settle_seconds := coalesce(settle_seconds, o.settle_seconds, 60);
    p.flush_mode := coalesce(flush_mode, o.flush_mode, 'required');
    -- a first turn that was not asked for may not fill a small window
    p.head_tokens := coalesce(head_tokens, least(coalesce(o.head_tokens, 2000), greatest(p.context_window::numeric * 5 / 8
        / case when p.token_scale between 0.5 and 4 then p.token_scale else 1 end / 8, 0)::integer));
    if coalesce(response_reserve, 0) + coalesce(memory_tokens, 0) >= p.context_window then
        v_faults := format('response_reserve %s and memory_tokens %s leave nothing of a context_window of %s',
            p.response_reserve, p.memory_tokens, p.context_window);
    elsif p.token_scale between 0.5 and 4 and p.context_window between 1000 and 100000000
        and p.response_reserve >= 0 and p.memory_tokens >= 0 then
        v_faults := pycontext._profile_faults(p);
    else
        v_faults := concat_ws('; ',
            case when not p.token_scale between 0.5 and 4 then format('token_scale is %s, not 0.5 to 4', p.token_scale) end,
            case when not p.context_window between 1000 and 100000000 then
                format('context_window is %s, not 1,000 to 100,000,000', p.context_window) end,
            case when p.response_reserve < 0 then format('response_reserve is %s', p.response_reserve) end,
            case when p.memory_tokens < 0 then format('memory_tokens is %s', p.memory_tokens) end);
    end if;
    if v_faults is not null then
        perform pycontext._raise('PCX06', 'the limits of this profile cannot work', format('profile %L: %s', profile, v_faults),
            'nothing was written; change these and set it again');
    end if;
    if (p.encoding, p.image_tokens) <> (o.encoding, o.image_tokens) and exists (
        select from pycontext.chat c where c.profile = set_profile.profile) then
        perform pycontext._raise('PCX06', 'chats are counted under this profile',
            format('profile %L: encoding and image_tokens are fixed while chats refer to it', profile),
            'set another profile, then move chats to it: select pycontext.set_chat_profile(chat_id, profile)');
    end if;
    select count(*), min(pycontext._budget(p, c.tool_tokens, c.token_scale)) into v_chats, v_budget
    from pycontext.chat c
    where c.profile = set_profile.profile and pycontext._budget(p, c.tool_tokens, c.token_scale) <= 0;
    if v_chats > 0 then
        perform pycontext._raise('PCX06', 'the limits of this profile leave no room for messages beside the tools',
            format('profile %L: budget %s in one of %s chats, whose tools take as much', profile, v_budget, v_chats),
            'nothing was written; use a larger context_window, or move these chats first');
    end if;
    insert into pycontext.profile (profile, tenant)
    select p.profile, p.tenant where o.profile is null
    on conflict on constraint profile_pk do nothing;
    update pycontext.profile t
    set encoding = p.encoding, token_scale = p.token_scale, context_window = p.context_window,
        response_reserve = p.response_reserve, memory_tokens = p.memory_tokens, head_tokens = p.head_tokens,
        tail_ratio = p.tail_ratio, summary_ratio = p.summary_ratio, trigger_ratio = p.trigger_ratio,
        trigger_tokens = p.trigger_tokens, target_ratio = p.target_ratio, image_tokens = p.image_tokens,
        strict_roles = p.strict_roles, compaction_mode = p.compaction_mode, summarizer_window = p.summarizer_window,
        settle_seconds = p.settle_seconds, flush_mode = p.flush_mode
    where t.profile = p.profile and t.tenant = p.tenant;
    get diagnostics v_rows = row_count;
    if v_rows = 0 then
        perform pycontext._raise('PCX10', 'no right to this profile', format('profile %L is shared by all, or another tenant''s',
            profile), 'use another name, or set pycontext.tenant to the tenant it belongs to');
    end if;
    select t.* into p from pycontext.profile t where t.profile = set_profile.profile;
    return p;
end
$$;
comment on function pycontext.set_profile(
    text, text, numeric, integer, integer, integer, integer, numeric, numeric, numeric, integer, numeric, integer, boolean,
    text, integer, integer, text) is
    'Makes or alters a profile: what is left out keeps its value (a new profile: the default''s, its head within an eighth '
    'of the budget); trigger_tokens 0 takes that limit off. Limits that cannot work are refused, all of them named.';

-- Moves a chat to another profile, as an act: its limits, encoding and token_scale hold from the next window on. PCX06.
create or replace function pycontext.set_chat_profile(chat_id text, profile text)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    o pycontext.profile;
    p pycontext.profile;
begin
    select t.* into p from pycontext.profile t where t.profile = set_chat_profile.profile;
    if not found then
        perform pycontext._raise('PCX06', 'no such profile', format('profile is %L', profile),
            'see: select profile from pycontext.profile');
    end if;
    if c.profile = p.profile and c.token_scale = p.token_scale then
        return c.act_no;
    end if;
    if pycontext._budget(p, c.tool_tokens, p.token_scale) <= 0 then
        perform pycontext._raise('PCX06', 'this profile leaves no room for messages beside the chat''s tools',
            format('profile %L leaves %s tokens with tool_tokens %s', p.profile,
                pycontext._budget(p, c.tool_tokens, p.token_scale), c.tool_tokens),
            'offer fewer tools, or choose a profile with a larger window');
    end if;
    select t.* into o from pycontext.profile t where t.profile = c.profile;
    c := pycontext._log_act(c, 'profile', false, jsonb_build_object('from', o.profile, 'to', p.profile));
    update pycontext.chat t set profile = p.profile, token_scale = p.token_scale, scales = '{}' where t.chat_id = c.chat_id;
    if c.source is null and (o.encoding, o.image_tokens) <> (p.encoding, p.image_tokens) then
        perform pycontext._recount(c, o, p);
    end if;
    perform pycontext._refresh_chat(c.chat_id);
    return c.act_no;
end
$$;
comment on function pycontext.set_chat_profile(text, text) is
    'Moves the chat to another profile: its limits, encoding and token_scale hold from the next window on. Counts made in '
    'another encoding become estimates until they are counted again. Returns the act_no it holds from.';

-- Counts of a native chat under another encoding or image rate; exact ones of the old encoding are kept beside.
create or replace function pycontext._recount(c pycontext.chat, o pycontext.profile, p pycontext.profile)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if o.encoding <> p.encoding then
        insert into pycontext.token_count (chat_id, seq, line_no, encoding, tenant, tokens)
        select m.chat_id, m.seq, m.line_no, m.encoding, m.tenant, m.tokens - m.images * o.image_tokens
        from pycontext.message m
        where m.chat_id = c.chat_id and m.encoding = o.encoding and m.images = 0
        order by m.seq, m.line_no
        on conflict on constraint token_count_pk do nothing;
    end if;
    update pycontext.message m
    set tokens = coalesce(k.tokens, m.tokens + m.images * (p.image_tokens - o.image_tokens)),
        encoding = case when k.tokens is not null then p.encoding when m.encoding = p.encoding then m.encoding end
    from pycontext.message x
    left join pycontext.token_count k
        on k.chat_id = x.chat_id and k.seq = x.seq and k.line_no = x.line_no and k.encoding = p.encoding and x.images = 0
            and o.encoding <> p.encoding
    where m.chat_id = c.chat_id and x.chat_id = m.chat_id and x.seq = m.seq and x.line_no = m.line_no
        and (o.encoding <> p.encoding or m.images > 0);
    if o.encoding <> p.encoding then
        update pycontext.prompt q set encoding = null where q.chat_id = c.chat_id and q.content <> '';
    end if;
end
$$;

-- A new chat with the live rows up to a message (null: all) and the lines wholly inside; numbers and ids stay. The
-- chat it comes from is as it was. new_chat_id null: one is made. PCX01, PCX02, PCX03 where that chat id is taken.
create or replace function pycontext.fork_chat(
    chat_id text, new_chat_id text default null, at_message_id text default null, owner text default null,
    metadata jsonb default null)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    n pycontext.chat := c;
    r pycontext._thread_row;
    v_at bigint := pycontext._newest_seq(c);
    v_details jsonb;
    v_rows bigint;
    v_now timestamptz := clock_timestamp();
begin
    if new_chat_id = '' or new_chat_id = chat_id then
        perform pycontext._raise('PCX02', 'a fork needs a chat id of its own', format('new_chat_id is %L', new_chat_id),
            'pass another one, or leave it out');
    end if;
    if at_message_id is not null then
        r := pycontext._message_of(c, at_message_id);
        v_at := r.seq;
    end if;
    n.chat_id := coalesce(new_chat_id, gen_random_uuid()::text);
    n.owner := coalesce(fork_chat.owner, c.owner);
    n.metadata := coalesce(fork_chat.metadata, c.metadata);
    n.source := null;
    n.act_no := c.act_no + 1;
    n.edit_no := pycontext._first_edit_no();
    n.read_tokens := null;
    n.created_at := v_now;
    n.updated_at := v_now;
    if c.source is null then
        n.last_seq := v_at;
    else
        n := jsonb_populate_record(n, '{"last_seq": 0, "line_seq": null, "line_no": null, "reset_seq": 0, "request_seq": null,
            "total_tokens": 0, "stub_total": 0, "live_tokens": 0, "excess_tokens": 0, "flushed_seq": null}');
    end if;
    v_details := jsonb_build_object('chat_id', c.chat_id, 'at_message_id', at_message_id);
    insert into pycontext.chat values (n.*) on conflict on constraint chat_pk do nothing;
    get diagnostics v_rows = row_count;
    if v_rows = 0 then
        if exists (
            select from pycontext.act a
            where a.chat_id = n.chat_id and a.act = 'forked' and a.details @> v_details) then
            return n.chat_id;  -- a retry
        end if;
        perform pycontext._raise('PCX03', 'this chat id is taken', format('new_chat_id is %L', n.chat_id),
            'fork into a chat id that is not in use');
    end if;
    insert into pycontext.prompt (chat_id, act_no, tenant, content, tokens, frozen_tokens, encoding, created_at)
    select n.chat_id, q.act_no, q.tenant, q.content, q.tokens, q.frozen_tokens, q.encoding, q.created_at
    from pycontext.prompt q where q.chat_id = c.chat_id;
    insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details, created_at)
    select n.chat_id, a.act_no, a.tenant, a.act, a.at_seq, a.details, a.created_at
    from pycontext.act a where a.chat_id = c.chat_id and c.source is null and a.act <> 'forked';
    insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details, created_at)
    values (n.chat_id, n.act_no, n.tenant, 'forked', v_at, v_details, v_now);
    if c.source is null then
        perform pycontext._copy_rows(c, n, v_at);
        perform pycontext._fork_facts(c.chat_id, n.chat_id, v_at);
    else
        perform pycontext._copy_source(c, n, v_at);
    end if;
    perform pycontext._refresh_chat(n.chat_id);
    return n.chat_id;
end
$$;
comment on function pycontext.fork_chat(text, text, text, text, jsonb) is
    'A new chat with the rows up to at_message_id (null: all), the lines wholly inside, and their pins; messages keep id and '
    '#seq. owner and metadata null: those of the chat it comes from. The same fork again returns the same chat.';

create or replace function pycontext._line_id(chat_id text, place bigint, origin text, gone bigint)
returns text
language sql immutable parallel safe
as $$
    select 'sum_' || encode(substring(sha256(convert_to(
        jsonb_build_array(chat_id, place, origin, gone)::text, 'UTF8')) from 1 for 12), 'hex')
$$;

-- The rows of a fork: live messages and lines up to at_seq, with their counts and pins.
create or replace function pycontext._copy_rows(c pycontext.chat, n pycontext.chat, at_seq bigint)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    r pycontext.message;
begin
    for r in
        select m.* from pycontext.message m
        where m.chat_id = c.chat_id and m.seq <= at_seq and m.gone_act is null
        order by m.seq, m.line_no
    loop
        r.chat_id := n.chat_id;
        if r.line_no > 0 then
            r.message_id := pycontext._line_id(n.chat_id, r.seq, r.origin, 0);
        end if;
        if r.superseded_seq > at_seq then
            r.superseded_seq := null;
        end if;
        insert into pycontext.message values (r.*);
    end loop;
    insert into pycontext.token_count (chat_id, seq, line_no, encoding, tenant, tokens)
    select n.chat_id, k.seq, k.line_no, k.encoding, k.tenant, k.tokens
    from pycontext.token_count k
    join pycontext.message m on m.chat_id = n.chat_id and m.seq = k.seq and m.line_no = k.line_no
    where k.chat_id = c.chat_id;
    insert into pycontext.pin (chat_id, seq, at_act, unit_seq, to_seq, tenant, message_id, created_at)
    select n.chat_id, i.seq, i.at_act, i.unit_seq, least(i.to_seq, at_seq), i.tenant, i.message_id, i.created_at
    from pycontext.pin i where i.chat_id = c.chat_id and i.gone_act is null and i.seq <= at_seq;
end
$$;

-- The rows of a fork of an adopted chat, which is a chat of our own: they get our numbers, and the lines follow them.
create or replace function pycontext._copy_source(c pycontext.chat, n pycontext.chat, at_seq bigint)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    l pycontext.message;
    v_messages jsonb;
    v_seqs bigint[];
begin
    select coalesce(jsonb_agg(jsonb_build_object('message_id', r.message_id, 'role', r.role, 'content', r.content,
            'tool_calls', r.tool_calls, 'tool_call_id', r.tool_call_id, 'name', r.name, 'created_at', r.created_at,
            'metadata', case when jsonb_typeof(r.metadata) = 'object' then r.metadata end) order by r.seq), '[]'),
        array_agg(r.seq order by r.seq)
    into v_messages, v_seqs
    from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[at_seq]) r;
    perform from pycontext.append_messages(n.chat_id, v_messages);
    for l in
        select m.* from pycontext.message m
        where m.chat_id = c.chat_id and m.line_no > 0 and m.gone_act is null and m.seq = any (v_seqs)
        order by m.seq, m.line_no
    loop
        l.chat_id := n.chat_id;
        l.seq := array_position(v_seqs, l.seq);
        l.unit_seq := l.seq;
        l.message_id := pycontext._line_id(n.chat_id, l.seq, l.origin, 0);
        l.at_act := n.act_no;
        l.request_seq := array_position(v_seqs, l.request_seq);
        l.head_from := array_position(v_seqs, l.head_from);
        l.head_to := array_position(v_seqs, l.head_to);
        l.covers_from := coalesce(array_position(v_seqs, l.covers_from), case when l.origin = 'compaction' then 1 end);
        select x.running_total, x.running_stub into l.running_total, l.running_stub
        from pycontext.message x where x.chat_id = n.chat_id and x.seq = l.seq and x.line_no = 0;
        if l.origin = 'compaction' then
            l.summary := jsonb_set(jsonb_set(l.summary, '{covers,from_seq}', to_jsonb(l.covers_from)),
                '{covers,to_seq}', to_jsonb(l.seq));
        end if;
        insert into pycontext.message values (l.*);
    end loop;
    insert into pycontext.pin (chat_id, seq, at_act, unit_seq, to_seq, tenant, message_id, created_at)
    select n.chat_id, m.seq, i.at_act, m.unit_seq, m.seq, i.tenant, i.message_id, i.created_at
    from pycontext.pin i
    join pycontext.message m on m.chat_id = n.chat_id and m.message_id = i.message_id
    where i.chat_id = c.chat_id and i.gone_act is null and i.seq <= at_seq;
end
$$;

-- A message as it is once erased: place, role, ids of calls stay; what was said, names, arguments and digest do not.
create or replace function pycontext._redacted(r pycontext.message, p pycontext.profile, act_no bigint)
returns pycontext.message
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k record;
begin
    r.content := case when r.calls = 0 then '"[redacted]"'::jsonb end;
    if r.calls > 0 then
        select jsonb_agg(jsonb_build_object('id', e.value -> 'id', 'type', 'function', 'function',
            '{"name": "redacted", "arguments": "{}"}'::jsonb) order by e.ordinality) into r.tool_calls
        from jsonb_array_elements(r.tool_calls) with ordinality e;
    end if;
    r.metadata := jsonb_strip_nulls(jsonb_build_object('redacted', true, 'injected', r.metadata -> 'injected',
        'pending', r.metadata -> 'pending'));
    r.name := null;
    r.stub := null;
    r.stub_calls := null;
    r.digest := '';
    r.images := 0;
    r.reasoning_tokens := 0;
    r.has_fence := false;
    r.is_plain := not (r.role = 'tool' and r.unit_seq = r.seq);
    select * into k from pycontext._count_pieces(
        case when r.is_plain then r.content
            else pycontext._rendered(r.content, false, true, r.tool_call_id, false) end,
        r.tool_calls, case when r.is_plain then r.role else 'user' end, null, p.image_tokens);
    r.tokens := k.overhead + pycontext._estimate_pieces(k.texts);
    r.frozen_tokens := r.tokens;
    r.stub_tokens := r.tokens;
    r.encoding := null;
    r.redacted_act := act_no;
    return r;
end
$$;

-- Two summaries as one, by code: lists joined oldest first, what is resolved pending no more, within max_tokens.
create or replace function pycontext._joined_summary(older jsonb, newer jsonb, max_tokens integer)
returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_key text;
    v_list jsonb;
    v_summary jsonb := '{}';
begin
    older := coalesce(older, '{}');
    newer := coalesce(newer, '{}');
    foreach v_key in array array['resolved', 'pending', 'decisions', 'facts', 'artifacts'] loop
        select coalesce(jsonb_agg(i.item order by i.n), '[]') into v_list
        from (
            select e.value as item, max(e.ordinality) as n
            from jsonb_array_elements(case jsonb_typeof(older -> v_key) when 'array' then older -> v_key else '[]' end
                || case jsonb_typeof(newer -> v_key) when 'array' then newer -> v_key else '[]' end) with ordinality e
            where v_key <> 'pending' or not coalesce(newer -> 'resolved', '[]') @> jsonb_build_array(e.value)
            group by e.value) i;
        v_summary := v_summary || jsonb_build_object(v_key, v_list);
    end loop;
    v_summary := v_summary || jsonb_build_object('active_task', newer -> 'active_task',
        'notes', concat_ws(E'\n', nullif(older ->> 'notes', ''), nullif(newer ->> 'notes', '')));
    -- the oldest goes first, prose before exact values
    foreach v_key in array array['notes', 'resolved', 'decisions', 'pending', 'artifacts', 'facts'] loop
        while pycontext.estimate_tokens(pycontext._summary_text(v_summary)) > max_tokens loop
            if v_key = 'notes' then
                v_summary := v_summary || '{"notes": ""}';
                exit;
            end if;
            exit when jsonb_array_length(v_summary -> v_key) = 0;
            v_summary := v_summary #- array[v_key, '0'];
        end loop;
    end loop;
    return v_summary;
end
$$;

-- Takes what a row said out of every line that drew on it: its segment, and the merged texts that used it. A line
-- stands and tells what the other segments hold. Returns how many lines it touched.
create or replace function pycontext._redact_lines(c pycontext.chat, r pycontext.message)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    l pycontext.message;
    q pycontext.message;
    v_made jsonb := '{}';
    v_direct boolean;
    v_tokens integer;
    v_text text;
begin
    for l in
        select m.* from pycontext.message m
        where m.chat_id = c.chat_id and m.line_no > 0 and m.origin = 'compaction' and m.seq >= r.seq
            and m.at_act > r.at_act and (r.gone_act is null or m.at_act < r.gone_act)
        order by m.at_act
    loop
        -- the line that it was merged into: the newest one before its place when it was made
        select m.* into q from pycontext.message m
        where m.chat_id = c.chat_id and m.line_no > 0 and m.seq < l.seq and m.at_act < l.at_act
            and (m.gone_act is null or m.gone_act >= l.at_act)
        order by m.seq desc, m.origin = 'reset' desc, m.line_no desc limit 1;
        v_direct := q.seq is null or r.seq > q.seq or q.request_seq = r.seq;
        if q.origin = 'reset' and r.seq <= q.seq or not v_direct and not v_made ? q.message_id then
            continue;
        end if;
        if v_direct then
            l.segment := null;
        end if;
        v_tokens := l.tokens;
        l.summary := pycontext._joined_summary(
            case when q.origin = 'compaction' then coalesce(v_made -> q.message_id, q.summary) end, l.segment, v_tokens)
            || jsonb_build_object('covers', l.summary -> 'covers');
        v_made := v_made || jsonb_build_object(l.message_id, l.summary);
        v_text := pycontext._summary_text(l.summary);
        if v_text is null or not pycontext._has_text(v_text) then
            v_text := 'What these notes told was erased.';
        end if;
        l.content := to_jsonb(pycontext._escape_fences(v_text));
        l.tokens := 4 + pycontext.estimate_tokens(
            pycontext._line_text(l.origin, l.covers_from, l.seq, l.content #>> '{}'));
        update pycontext.message m
        set content = l.content, summary = l.summary, segment = l.segment, tokens = l.tokens, frozen_tokens = l.tokens,
            stub_tokens = l.tokens, encoding = null, redacted_act = c.act_no,
            digest = pycontext._digest('user', l.content, null, null, null)
        where m.chat_id = l.chat_id and m.seq = l.seq and m.line_no = l.line_no;
        delete from pycontext.token_count k where k.chat_id = l.chat_id and k.seq = l.seq and k.line_no = l.line_no;
    end loop;
    return (select count(*) from jsonb_object_keys(v_made));
end
$$;

-- Erases what a message said: its content, names and arguments, and every segment, merged text, stub, count
-- and digest that drew on it. The row stays, redacted; so do the lines. Returns the row. PCX01, PCX02, PCX09.
create or replace function pycontext.redact_message(chat_id text, message_id text)
returns pycontext.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_native(chat_id,
        'change the row in your own table, then: select pycontext.source_changed(chat_id, message_id)');
    p pycontext.profile;
    r pycontext.message;
    t pycontext.message;
    v_seqs bigint[];
    v_gone bigint[];
    v_frozen integer[];
    v_stub integer[];
    v_lines integer;
    v_old integer;
begin
    select m.* into r from pycontext.message m
    where m.chat_id = c.chat_id and m.message_id = redact_message.message_id and m.line_no = 0;
    if not found then
        perform pycontext._no_such_message(chat_id, message_id);
    end if;
    if r.redacted_act is not null then
        return r;
    end if;
    select q.* into p from pycontext.profile q where q.profile = c.profile;
    c := pycontext._log_act(c, 'redacted', true, jsonb_build_object('seq', r.seq));
    v_lines := pycontext._redact_lines(c, r);
    t := r;
    r := pycontext._redacted(r, p, c.act_no);
    v_seqs := array[r.seq];
    v_gone := array[r.gone_act];
    v_frozen := array[r.frozen_tokens - t.frozen_tokens];
    v_stub := array[r.stub_tokens - t.stub_tokens];
    update pycontext.message m
    set content = r.content, tool_calls = r.tool_calls, metadata = r.metadata, name = r.name, stub = r.stub,
        stub_calls = r.stub_calls, digest = r.digest, images = r.images, reasoning_tokens = r.reasoning_tokens,
        has_fence = r.has_fence, is_plain = r.is_plain, tokens = r.tokens, frozen_tokens = r.frozen_tokens,
        stub_tokens = r.stub_tokens, encoding = r.encoding, redacted_act = r.redacted_act
    where m.chat_id = r.chat_id and m.seq = r.seq and m.line_no = 0;
    delete from pycontext.token_count k where k.chat_id = r.chat_id and k.seq = r.seq and k.line_no = 0;
    -- stubs of the results of an erased call tell its name and argument
    for t in
        select m.* from pycontext.message m
        where m.chat_id = r.chat_id and m.seq > r.seq and m.unit_seq = r.seq and r.calls > 0 and m.role = 'tool'
            and m.frozen_tokens > 60 and m.redacted_act is null
    loop
        v_seqs := v_seqs || t.seq;
        v_gone := v_gone || t.gone_act;
        v_frozen := v_frozen || 0;
        v_old := t.stub_tokens;
        t.stub := pycontext._stub('redacted', null, coalesce(pycontext._content_text(t.content), ''),
            coalesce(t.metadata ->> 'is_error', '') = 'true', t.seq);
        t.stub_tokens := 14 + pycontext.estimate_tokens(t.stub)
            + case when t.name is null then 0 else 1 + pycontext.estimate_tokens(t.name) end;
        if t.stub_tokens > 0.8 * t.frozen_tokens then
            t.stub := null;
            t.stub_tokens := t.frozen_tokens;
        end if;
        v_stub := v_stub || t.stub_tokens - v_old;
        update pycontext.message m set stub = t.stub, stub_tokens = t.stub_tokens
        where m.chat_id = t.chat_id and m.seq = t.seq and m.line_no = 0;
    end loop;
    perform pycontext._shift_totals(c.chat_id, v_seqs, v_gone, v_frozen, v_stub);
    update pycontext.act a set details = a.details || jsonb_build_object('lines', v_lines)
    where a.chat_id = c.chat_id and a.act_no = c.act_no;
    perform pycontext._erase_facts(c.chat_id, r.seq);
    perform pycontext._refresh_chat(c.chat_id);
    select m.* into r from pycontext.message m where m.chat_id = r.chat_id and m.seq = r.seq and m.line_no = 0;
    return r;
end
$$;
comment on function pycontext.redact_message(text, text) is
    'Erases what a message said, in the thread and set aside alike: content, names, arguments, and every summary segment, '
    'merged text, fact, stub, count and digest that drew on it, in one transaction. The row stays, marked; replays show it '
    'erased. Dead tuples and backups hold the old bytes until vacuum and rotation.';

-- After rows came to take less: every total that includes them, on rows, lines, borders. gone_acts: the acts that set
-- them aside, for what was written after does not include them.
create or replace function pycontext._shift_totals(
    chat_id text, seqs bigint[], gone_acts bigint[], frozen_by integer[], stub_by integer[])
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    update pycontext.message m
    set running_total = m.running_total + d.frozen, running_stub = m.running_stub + d.stub
    from (
        select x.seq, x.line_no, sum(s.frozen) as frozen, sum(s.stub) as stub
        from pycontext.message x
        join unnest(seqs, gone_acts, frozen_by, stub_by) s (seq, gone, frozen, stub)
            on s.seq <= x.seq and (s.gone is null or x.at_act < s.gone)
        where x.chat_id = _shift_totals.chat_id and x.seq >= seqs[1]
        group by x.seq, x.line_no
        having sum(s.frozen) <> 0 or sum(s.stub) <> 0) d
    where m.chat_id = _shift_totals.chat_id and m.seq = d.seq and m.line_no = d.line_no;
    update pycontext.message m
    set head_frozen = m.head_frozen + case when seqs[1] between m.head_from and m.head_to then frozen_by[1] else 0 end,
        request_frozen = m.request_frozen + case when m.request_seq = seqs[1] and m.request_frozen > 0 then frozen_by[1] else 0 end
    where m.chat_id = _shift_totals.chat_id and m.line_no > 0
        and (seqs[1] between m.head_from and m.head_to or m.request_seq = seqs[1]);
    update pycontext.act a
    set details = a.details || jsonb_build_object('prune_total', (a.details ->> 'prune_total')::bigint + d.frozen,
        'prune_stub', (a.details ->> 'prune_stub')::bigint + d.stub)
    from (
        select x.act_no, sum(s.frozen) as frozen, sum(s.stub) as stub
        from pycontext.act x
        join unnest(seqs, gone_acts, frozen_by, stub_by) s (seq, gone, frozen, stub)
            on s.seq < (x.details ->> 'prune_unit')::bigint and (s.gone is null or x.act_no < s.gone)
        where x.chat_id = _shift_totals.chat_id and x.act = 'pruned'
        group by x.act_no) d
    where a.chat_id = _shift_totals.chat_id and a.act_no = d.act_no;
    update pycontext.chat t
    set prune_total = t.prune_total + d.frozen, prune_stub = t.prune_stub + d.stub
    from (
        select sum(s.frozen) as frozen, sum(s.stub) as stub
        from unnest(seqs, gone_acts, frozen_by, stub_by) s (seq, gone, frozen, stub)
        join pycontext.chat x on x.chat_id = _shift_totals.chat_id and s.seq < x.prune_unit
        where s.gone is null) d
    where t.chat_id = _shift_totals.chat_id and d.frozen is not null;
end
$$;

-- Takes a summary back: the line before it counts again, and its place can be summarized anew. Returns the row, marked
-- gone. A reset is never removed. PCX01, PCX02.
create or replace function pycontext.drop_summary(chat_id text, summary_id text)
returns pycontext.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    r pycontext.message;
begin
    select m.* into r from pycontext.message m
    where m.chat_id = c.chat_id and m.message_id = summary_id and m.line_no > 0;
    if not found then
        perform pycontext._raise('PCX02', 'no such summary in this chat',
            format('chat_id is %L, summary_id is %L', chat_id, summary_id),
            'see: select message_id, seq from pycontext.thread(chat_id) where kind = ''summary''');
    end if;
    if r.origin = 'reset' then
        perform pycontext._raise('PCX02', 'a reset is never removed', format('%L stands after #%s', summary_id, r.seq),
            'rewind_chat to a message before it takes it along; fork_chat goes on from one in a chat of its own');
    end if;
    if r.gone_act is not null then
        return r;
    end if;
    c := pycontext._log_act(c, 'dropped', true, jsonb_build_object('summary_id', r.message_id, 'to_seq', r.seq));
    update pycontext.message m set gone_act = c.act_no
    where m.chat_id = r.chat_id and m.seq = r.seq and m.line_no = r.line_no;
    perform pycontext._refresh_chat(c.chat_id);
    r.gone_act := c.act_no;
    return r;
end
$$;
comment on function pycontext.drop_summary(text, text) is
    'Takes a summary back: its row is marked gone, the line before it counts again, and the same place can be summarized '
    'anew. Resets are never removed. Returns the row.';

-- The pins of a chat at an act (null: now), oldest pin first, a unit once; none from before the newest reset.
create or replace function pycontext._live_pins(chat_id text, act bigint default null)
returns setof pycontext._pin_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
    v_source text;
    v_reset bigint;
begin
    select c.source, c.reset_seq into v_source, v_reset from pycontext.chat c where c.chat_id = _live_pins.chat_id;
    if act is not null then
        select max(m.seq) into v_reset
        from pycontext.message m
        where m.chat_id = _live_pins.chat_id and m.line_no > 0 and m.origin = 'reset' and m.at_act <= act
            and (m.gone_act is null or m.gone_act > act);
    end if;
    return query
    select q.*
    from (
        select distinct on (u.unit_seq) p.seq, p.message_id, u.unit_seq, p.to_seq, p.at_act, u.tokens::integer
        from (
            select distinct on (i.unit_seq, case when v_source is not null then i.seq end)
                i.seq, i.message_id, i.unit_seq, i.to_seq, i.at_act
            from pycontext.pin i
            where i.chat_id = _live_pins.chat_id
                and (act is null and i.gone_act is null or i.at_act <= act and (i.gone_act is null or i.gone_act > act))
                and (v_source is not null and coalesce(v_reset, 0) = 0 or i.unit_seq > coalesce(v_reset, 0))
            order by i.unit_seq, case when v_source is not null then i.seq end, i.at_act) p
        cross join lateral (
            select r.unit_seq, sum(greatest(r.tokens, r.frozen_tokens)) as tokens
            from pycontext._thread_rows(_live_pins.chat_id, v_source, array[p.unit_seq], array[p.unit_seq],
                case when v_source is null then act end) r
            group by r.unit_seq
            having v_source is null or bool_or(r.seq = p.seq)
            union all
            -- a product deleted the call: its result stands for itself
            select r.unit_seq, sum(greatest(r.tokens, r.frozen_tokens))
            from pycontext._thread_rows(_live_pins.chat_id, v_source, array[p.seq], array[p.seq]) r
            where v_source is not null and p.unit_seq <> p.seq
            group by r.unit_seq
            limit 1) u
        order by u.unit_seq, p.at_act) q
    order by q.at_act, q.seq;
end
$$;

-- The pins of a read: those of now, in a replay those of then.
create or replace function pycontext._pins_of(s pycontext._window_state)
returns setof pycontext._pin_row
language sql stable
as $$
    select * from pycontext._live_pins(s.chat_id, case when s.source is null then s.act_arg
        when s.hi_act < s.act_no then s.hi_act end)
$$;

-- The unit of a message: where it starts and ends.
create or replace function pycontext._unit_of(c pycontext.chat, r pycontext._thread_row, out unit_seq bigint, out to_seq bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    unit_seq := r.unit_seq;
    to_seq := r.seq;
    if c.source is null then
        select max(t.seq) into to_seq
        from pycontext._thread_rows(c.chat_id, null, array[unit_seq], array[unit_seq]) t;
    else
        -- a foreign row read alone does not know its call
        select t.unit_seq into unit_seq
        from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[r.seq], null, 256, true) t
        where t.seq = r.seq;
        select max(t.seq) into to_seq
        from pycontext._thread_rows(c.chat_id, c.source, array[unit_seq], array[4611686018427387904], null, 256) t
        where t.unit_seq = _unit_of.unit_seq;
    end if;
end
$$;

-- Keeps a message, with its unit, in every window until it is unpinned. Refused where the pins would leave no room
-- for the newest turn (PCX05). Again is once. Returns the pin. PCX01, PCX02.
create or replace function pycontext.pin_message(chat_id text, message_id text)
returns pycontext.pin
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    s pycontext._window_state;
    r pycontext._thread_row;
    i pycontext.pin;
    u record;
    v_room bigint;
    v_pins bigint;
    v_turn bigint;
    v_request bigint;
begin
    r := pycontext._message_of(c, message_id);
    select t.* into i from pycontext.pin t
    where t.chat_id = c.chat_id and t.seq = r.seq and t.gone_act is null;
    if found then
        return i;
    end if;
    if r.seq <= c.reset_seq and c.reset_seq <> 0 then
        perform pycontext._raise('PCX02', 'this message lies before the place where the chat started over',
            format('message #%s, reset after #%s', r.seq, c.reset_seq), 'nothing from before it reaches the model again');
    end if;
    s := pycontext._chat_state(chat_id, null, null);
    select q.unit_seq, q.to_seq into u from pycontext._unit_of(c, r) q;
    select coalesce(sum(greatest(t.tokens, t.frozen_tokens)), 0) into v_pins
    from pycontext._thread_rows(c.chat_id, c.source, array[u.unit_seq], array[u.unit_seq]) t
    where s.turn_seq is null or t.unit_seq < s.turn_seq;
    select v_pins + coalesce(sum(q.tokens), 0) into v_pins
    from pycontext._live_pins(c.chat_id) q
    where q.unit_seq <> u.unit_seq and (s.turn_seq is null or q.unit_seq < s.turn_seq);
    -- the newest turn: its request whole, and of what followed as much as the tail may take
    select coalesce(sum(t.tokens) filter (where t.seq = s.turn_seq), 0), coalesce(sum(t.tokens), 0) into v_request, v_turn
    from pycontext._thread_rows(c.chat_id, c.source, array[s.turn_seq], array[s.hi_seq]) t
    where s.turn_seq is not null;
    v_turn := greatest(v_request, least(v_turn, floor(s.tail_ratio * s.token_budget)::bigint));
    v_room := s.token_budget - 3 - coalesce(s.prompt_tokens, 0) - v_turn;
    if v_pins > v_room then
        perform pycontext._raise('PCX05', 'pins would leave no room for the newest turn',
            format('token_budget is %s, the system prompt takes %s, the newest turn %s, pins would take %s of %s',
                s.token_budget, coalesce(s.prompt_tokens, 0), v_turn, v_pins, greatest(v_room, 0)),
            'unpin others first: select pycontext.unpin_message(chat_id, message_id)');
    end if;
    c := pycontext._log_act(c, 'pinned', false, jsonb_build_object('seq', r.seq));
    insert into pycontext.pin (chat_id, seq, at_act, unit_seq, to_seq, tenant, message_id, created_at)
    values (c.chat_id, r.seq, c.act_no, u.unit_seq, u.to_seq, c.tenant, r.message_id, c.updated_at);
    update pycontext.chat t set pins = t.pins + 1 where t.chat_id = c.chat_id;
    select t.* into i from pycontext.pin t
    where t.chat_id = c.chat_id and t.seq = r.seq and t.gone_act is null;
    return i;
end
$$;
comment on function pycontext.pin_message(text, text) is
    'Keeps a message verbatim in every window, with its unit, until it is unpinned. Refused where pins would leave no room '
    'for the newest turn. Pinning again returns the pin that is there.';

-- Takes a pin off. Returns it, marked gone; null where the message is not pinned. PCX01.
create or replace function pycontext.unpin_message(chat_id text, message_id text)
returns pycontext.pin
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    i pycontext.pin;
begin
    select t.* into i from pycontext.pin t
    where t.chat_id = c.chat_id and t.message_id = unpin_message.message_id and t.gone_act is null;
    if not found then
        return null;
    end if;
    c := pycontext._log_act(c, 'unpinned', false, jsonb_build_object('seq', i.seq));
    update pycontext.pin t set gone_act = c.act_no
    where t.chat_id = i.chat_id and t.seq = i.seq and t.at_act = i.at_act;
    update pycontext.chat t set pins = t.pins - 1 where t.chat_id = c.chat_id;
    i.gone_act := c.act_no;
    return i;
end
$$;
comment on function pycontext.unpin_message(text, text) is
    'Takes a pin off. Returns it, marked gone; null where the message is not pinned.';

-- Deletes the rows of chats from every table that has chat_id, what refers to others first. Returns the counts.
create or replace function pycontext._erase(chat_ids text[])
returns setof pycontext.erased_row
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_left oid[];
    v_next oid[];
    v_table oid;
    r pycontext.erased_row;
begin
    select array_agg(k.oid order by k.relname) into v_left
    from pg_catalog.pg_class k
    join pg_catalog.pg_attribute a on a.attrelid = k.oid and a.attname = 'chat_id' and not a.attisdropped
    where k.relnamespace = 'pycontext'::regnamespace and k.relkind in ('r', 'p') and not k.relispartition;
    while cardinality(v_left) > 0 loop
        select array_agg(t.id order by t.n) into v_next
        from unnest(v_left) with ordinality t (id, n)
        where not exists (
            select from pg_catalog.pg_constraint f
            where f.contype = 'f' and f.confrelid = t.id and f.conrelid <> t.id and f.conrelid = any (v_left));
        foreach v_table in array v_next loop
            execute format('delete from %s where chat_id = any ($1)', v_table::regclass) using chat_ids;
            get diagnostics r.rows = row_count;
            select k.relname into r.relation from pg_catalog.pg_class k where k.oid = v_table;
            return next r;
        end loop;
        select array_agg(t.id order by t.n) into v_left
        from unnest(v_left) with ordinality t (id, n) where t.id <> all (v_next);
    end loop;
end
$$;

-- Deletes a chat and every row derived from it. Returns how many rows of which relation. Rows of an adopted chat stay
-- in the product's table. PCX01.
create or replace function pycontext.delete_chat(chat_id text)
returns setof pycontext.erased_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from pycontext.chat c where c.chat_id = delete_chat.chat_id for update;
    if not found and not exists (select from pycontext.source s where s.is_default) then
        perform pycontext._no_such_chat(chat_id);
    end if;
    return query select * from pycontext._erase(array[delete_chat.chat_id]);
end
$$;
comment on function pycontext.delete_chat(text) is
    'Deletes a chat and every row derived from it, in one transaction; returns how many rows of which relation. Of an '
    'adopted chat the product''s own rows stay.';

-- Deletes all chats of an owner and every row that belongs to the owner. Returns how many rows of which relation.
create or replace function pycontext.forget_owner(owner text, tenant text default null)
returns setof pycontext.erased_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant text := pycontext._tenant(tenant);
    v_chats text[];
    v_table record;
    v_rows bigint;
    v_owned jsonb := '{}';
begin
    if coalesce(owner, '') = '' then
        perform pycontext._raise('PCX02', 'whose rows?', format('owner is %L', owner), 'pass the owner the chats were made with');
    end if;
    select array_agg(c.chat_id) into v_chats
    from (
        select t.chat_id from pycontext.chat t
        where t.owner = forget_owner.owner and t.tenant = v_tenant
        order by t.chat_id for update) c;
    -- what is the owner's without being a chat's
    for v_table in
        select k.oid::regclass as name, k.relname
        from pg_catalog.pg_class k
        where k.relnamespace = 'pycontext'::regnamespace and k.relkind in ('r', 'p') and not k.relispartition
            and k.relname <> 'chat' and (
                select count(*) from pg_catalog.pg_attribute a
                where a.attrelid = k.oid and a.attname in ('owner', 'tenant') and not a.attisdropped) = 2
        order by k.relname
    loop
        execute format('delete from %s where owner = $1 and tenant = $2', v_table.name) using owner, v_tenant;
        get diagnostics v_rows = row_count;
        v_owned := v_owned || jsonb_build_object(v_table.relname, v_rows);
    end loop;
    return query
    select coalesce(e.relation, o.key), coalesce(e.rows, 0) + coalesce(o.value::text::bigint, 0)
    from pycontext._erase(coalesce(v_chats, '{}')) e
    full join jsonb_each(v_owned) o on o.key = e.relation;
end
$$;
comment on function pycontext.forget_owner(text, text) is
    'Deletes all chats of an owner, and every row derived from them or kept for the owner, in one transaction; returns how '
    'many rows of which relation. tenant null: the session''s.';
