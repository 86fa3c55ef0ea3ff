-- What grids are parts of: the profile's budget, halved for a smaller model until it is near the call's, so that a
-- small change of the call's budget moves no border.
create or replace function pycontext._grid_budget(profile_budget integer, token_budget integer)
returns numeric
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_budget numeric := profile_budget;
begin
    while v_budget > 1.25 * token_budget loop
        v_budget := v_budget / 2;
    end loop;
    return v_budget;
end
$$;

-- Before every seq: 0 for our own rows, far below for a product's.
create or replace function pycontext._origin(source text)
returns bigint
language sql immutable parallel safe
as $$
    select case when source is null then 0 else -4611686018427387904 end
$$;

-- The unit of an adopted chat after the first n that have been read.
create or replace function pycontext._walked_unit(s pycontext._window_state, n integer)
returns pycontext._border_row
language sql immutable parallel safe
as $$
    select s.walked_units[n + 1], s.walked_starts[n + 1], s.walked_starts[n + 1], null::bigint
$$;

comment on function pycontext._walked_unit(pycontext._window_state, integer) is
    'Private. The unit of an adopted chat after the first n that have been read.';

-- The first unit at or after from_seq; null where there is none.
create or replace function pycontext._first_unit(s pycontext._window_state, from_seq bigint)
returns pycontext._border_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    b pycontext._border_row;
begin
    if from_seq >= s.floor_seq then
        return pycontext._walked_unit(s, width_bucket(from_seq - 1, s.walked_units));
    else
        select r.unit_seq, r.running_total - r.frozen_tokens, r.running_stub - r.stub_tokens, r.after_user into b
        from pycontext._thread_rows(s.chat_id, s.source, array[from_seq], array[s.hi_seq], s.act_arg,
            case when s.source is null then 1 end, min_start => -4611686018427387904) r
        order by r.unit_seq limit 1;
    end if;
    return b;
end
$$;

-- Where the first unit after lo_seq begins.
create or replace function pycontext._first_seq(s pycontext._window_state)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if s.source is null and s.hi_act = 0 and s.straddles = '{}' then
        return s.lo_seq + 1;  -- nothing was ever set aside
    elsif s.source is null then
        return (pycontext._first_unit(s, s.lo_seq + 1)).unit_seq;
    end if;
    return coalesce(
        (select min(w.unit_seq) from unnest(s.walked) w where w.unit_seq > s.lo_seq and s.walked_at @> s.lo_seq + 1),
        (select min(r.unit_seq)
        from pycontext._thread_rows(s.chat_id, s.source, array[s.lo_seq + 1], array[s.hi_seq], null, 16) r));
end
$$;

-- The unit that starts newest.
create or replace function pycontext._newest_unit(s pycontext._window_state)
returns pycontext._border_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    b pycontext._border_row;
    v_rows integer := 16;
begin
    if s.source is not null then
        if s.walked_units[cardinality(s.walked_units)] > s.lo_seq then
            b := pycontext._first_unit(s, s.walked_units[cardinality(s.walked_units)]);
        end if;
        return b;
    end if;
    loop
        select r.unit_seq, r.running_total - r.frozen_tokens, r.running_stub - r.stub_tokens, r.after_user into b
        from pycontext._thread_rows(s.chat_id, null, array[s.lo_seq + 1], array[s.hi_seq], s.act_arg, v_rows, true) r
        where r.seq = r.unit_seq
        order by r.unit_seq desc limit 1;
        exit when b.unit_seq is not null or v_rows > 100000;
        v_rows := v_rows * 8;
    end loop;
    return b;
end
$$;

-- The first unit that starts at or after a running total: guesses from the chat's mean, and doubles the step back
-- until a unit before it is in reach. Of an adopted chat the units are known.
create or replace function pycontext._border(s pycontext._window_state, total bigint)
returns pycontext._border_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    b pycontext._border_row;
    v_floor bigint;
    v_back bigint;
    v_start bigint;
begin
    if s.source is not null then
        return pycontext._walked_unit(s, greatest(width_bucket(s.floor_seq - 1, s.walked_units),
            width_bucket(total - 1, s.walked_starts)));
    end if;
    v_back := 4 + ceil(1.1 * (s.total_hi - total) * s.hi_seq / greatest(s.total_hi, 1));
    loop
        v_floor := greatest(s.hi_seq - v_back, s.lo_seq + 1);
        -- the unit it starts from comes with the unit asked for: totals grow, so the least is the one
        select min(r.running_total - r.frozen_tokens), min(r.unit_seq) filter (where r.running_total - r.frozen_tokens >= total),
            min(r.running_total - r.frozen_tokens) filter (where r.running_total - r.frozen_tokens >= total),
            min(r.running_stub - r.stub_tokens) filter (where r.running_total - r.frozen_tokens >= total),
            (array_agg(r.after_user order by r.unit_seq) filter (where r.running_total - r.frozen_tokens >= total))[1]
        into v_start, b.unit_seq, b.start_total, b.start_stub, b.after_user
        from pycontext._thread_rows(s.chat_id, null, array[v_floor], array[s.hi_seq], s.act_arg, min_start => total) r;
        exit when v_floor = s.lo_seq + 1 or v_start < total;
        v_back := v_back * 2;
    end loop;
    return b;
end
$$;

-- The row of a message by its seq, as it stood.
create or replace function pycontext._row_at(s pycontext._window_state, seq bigint)
returns pycontext._place_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    p pycontext._place_row;
begin
    if s.walked_at @> seq then
        select r.seq, r.message_id, r.unit_seq, r.is_user, r.running_total, r.running_stub, r.frozen_tokens, r.stub_tokens,
            r.after_user
        into p
        from unnest(s.walked) r
        where r.seq = _row_at.seq;
        return p;
    end if;
    select r.seq, r.message_id, r.unit_seq, r.is_user, r.running_total, r.running_stub, r.frozen_tokens, r.stub_tokens, r.after_user
    into p
    from pycontext._thread_rows(s.chat_id, s.source, array[seq], array[seq], s.hi_act, 1, true) r;
    return p;
end
$$;

-- The newest real user message before the unit that starts at unit_seq; null at or below lo_seq.
create or replace function pycontext._request_before(
    s pycontext._window_state, unit_seq bigint, after_user bigint, lo_seq bigint)
returns pycontext._place_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    p pycontext._place_row;
begin
    if s.source is not null then
        after_user := s.walked_users[width_bucket(unit_seq - 1, s.walked_users)];
        if after_user is null then
            select t.seq, t.message_id, t.unit_seq, t.is_user, t.running_total, t.running_stub, t.frozen_tokens, t.stub_tokens,
                t.after_user
            into p
            from pycontext._thread_rows(s.chat_id, s.source, array[lo_seq + 1], array[unit_seq - 1], null, 1, true,
                users_only => true) t
            order by t.seq desc limit 1;
            return p;
        end if;
    end if;
    if after_user > lo_seq then
        p := pycontext._row_at(s, after_user);
    end if;
    return p;
end
$$;

-- The first turn after lo_seq, within its limit of tokens: its range and cost. Null where there is no user message.
create or replace function pycontext._head_range(
    s pycontext._window_state, out head_from bigint, out head_to bigint, out head_frozen integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_from bigint := s.lo_seq + 1;
    v_step bigint := 64;
    v_to bigint;
    v_users bigint;
begin
    if s.source is not null then
        -- in what has been read, where that holds the turn whole
        v_to := (select least(upper(q) - 1, s.hi_seq) from unnest(s.walked_at) q where q @> v_from);
        select min(r.seq), count(*) into head_from, v_users
        from unnest(s.walked) r
        where r.unit_seq between v_from and v_to and r.is_user;
        if v_to < s.hi_seq is not false and v_users < 2 then
            s.walked_at := null;
            v_to := s.hi_seq;
            select min(r.seq) into head_from
            from pycontext._thread_rows(s.chat_id, s.source, array[v_from], array[v_to], null, 1, false, users_only => true) r
            where r.is_user;
        end if;
    else
        loop
            select min(r.seq) into head_from
            from pycontext._thread_rows(s.chat_id, null, array[v_from], array[least(v_from + v_step - 1, s.hi_seq)],
                s.act_arg) r
            where r.is_user;
            v_from := v_from + v_step;
            exit when head_from is not null or v_from > s.hi_seq;
            v_step := v_step * 2;
        end loop;
        v_to := least(head_from + 200, s.hi_seq);
    end if;
    -- as appends leave it: up to a row before the next user message where every call so far has its result, so that
    -- nothing comes into it later
    select max(h.seq), coalesce(max(h.total), 0) into head_to, head_frozen
    from (
        select r.seq, sum(r.frozen_tokens) over w as total, count(*) filter (where r.is_user) over w as users,
            sum(case when r.calls > 0 then r.calls when r.role <> 'tool' or r.unit_seq = r.seq
                or coalesce(r.metadata ->> 'pending', '') = 'true' then 0 else -1 end) over w as waiting
        from pycontext._thread_rows(s.chat_id, s.source, array[head_from], array[v_to], s.act_arg,
            case when s.source is not null then 200 end, walked => s.walked, walked_at => s.walked_at) r
        where r.seq <= s.hi_seq
        window w as (order by r.seq)) h
    where h.users = 1 and (h.seq = head_from or h.waiting = 0 and h.total <= s.head_tokens);
end
$$;

create or replace function pycontext._no_such_message(chat_id text, message_id text)
returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pycontext._raise('PCX02', 'no such message in this chat',
        format('chat_id is %L, message_id is %L', chat_id, message_id),
        'see: select seq, message_id from pycontext.thread(chat_id)');
end
$$;

-- Where a marker ends: the newest row before a border that is not shown; before its start where it would mark nothing.
create or replace function pycontext._marker_end(s pycontext._window_state, from_seq bigint, border_seq bigint, shown bigint[])
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_seq bigint := border_seq - 1;
begin
    if s.source is null and s.hi_act = 0 and s.straddles = '{}' then
        while v_seq = any (shown) loop
            v_seq := v_seq - 1;  -- nothing was ever set aside
        end loop;
        return greatest(v_seq, from_seq - 1);
    end if;
    if s.source is not null then
        -- mostly among what has been read
        select max(w.seq) into v_seq
        from unnest(s.walked) w
        where w.seq between greatest(from_seq, s.floor_seq) and border_seq - 1 and (w.seq = any (shown)) is not true;
        if v_seq is not null then
            return v_seq;
        end if;
    end if;
    select max(r.seq) into v_seq
    from pycontext._thread_rows(s.chat_id, s.source, array[from_seq], array[border_seq - 1], s.act_arg,
        cardinality(shown) + 1, true) r
    where (r.seq = any (shown)) is not true;
    return coalesce(v_seq, from_seq - 1);
end
$$;

-- How many calls after the line waited for a result at the time of a replay: of those that wait now, were answered
-- since or are set aside since, the ones that no result was there for.
create or replace function pycontext._waiting_then(s pycontext._window_state)
returns bigint
language sql stable
as $$
    select count(*)
    from (
        select (o.value ->> 'seq')::bigint as unit_seq, split_part(o.key, '#' || (o.value ->> 'seq'), 1) as call_id
        from jsonb_each(s.open_calls) o
        union
        select r.unit_seq, r.tool_call_id
        from pycontext.act a
        cross join lateral pycontext._thread_rows(s.chat_id, null, array[(a.details ->> 'unit_seq')::bigint],
            array[(a.details ->> 'unit_seq')::bigint]) r
        where a.chat_id = s.chat_id and a.act_no > s.hi_act and a.act = 'late_result' and r.role = 'tool'
        union
        select r.seq, e.value ->> 'id'
        from pycontext._stored_row r
        cross join lateral jsonb_array_elements(r.tool_calls) e
        where r.chat_id = s.chat_id and r.gone_act > s.hi_act and r.at_act <= s.hi_act and r.calls > 0) o
    where o.unit_seq between s.lo_seq + 1 and s.hi_seq and not exists (
        select from pycontext._thread_rows(s.chat_id, null, array[o.unit_seq], array[o.unit_seq], s.hi_act) r
        where r.role = 'tool' and r.seq <= s.hi_seq and r.tool_call_id = o.call_id)
$$;

-- The figures of a chat as they stand now, or stood at message as_of: what every read starts from.
create or replace function pycontext._chat_state(chat_id text, token_budget integer, as_of text)
returns pycontext._window_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
declare
    s pycontext._window_state;
    c record;
    m record;
    l pycontext.message;
    q record;
    v_read integer;
    v_excess integer;
    v_open integer := 0;
begin
    select t.chat_id, t.source, t.profile, t.token_scale, t.tool_tokens, t.last_seq, t.act_no, t.edit_no, t.total_tokens,
        t.stub_total, t.live_tokens, t.excess_tokens, t.line_seq, t.line_no, t.reset_seq, t.request_seq, t.head_seq,
        t.head_to, t.head_base, t.open_calls, t.straddles, t.prune_unit, t.prune_total, t.prune_stub, t.prune_request, t.pins, p.encoding, p.image_tokens, p.head_tokens, p.tail_ratio,
        pycontext._budget(p, t.tool_tokens, t.token_scale) as budget
    into c
    from pycontext.chat t
    join pycontext.profile p on p.profile = t.profile
    where t.chat_id = _chat_state.chat_id;
    if not found then
        -- no row of its own: it belongs to the default source under the default profile
        select _chat_state.chat_id, d.source, p.profile, p.token_scale, 0 as tool_tokens, 0::bigint as last_seq,
            0::bigint as act_no, 0::bigint as edit_no, 0::bigint as total_tokens, 0::bigint as stub_total,
            0::bigint as live_tokens, 0::bigint as excess_tokens, null::bigint as line_seq, null::smallint as line_no,
            0::bigint as reset_seq, null::bigint as request_seq, null::bigint as head_seq, null::bigint as head_to, 0::bigint as head_base,
            '{}'::jsonb as open_calls, '{}'::int8multirange as straddles, null::bigint as prune_unit,
            null::bigint as prune_total, null::bigint as prune_stub, null::bigint as prune_request, 0 as pins, p.encoding, p.image_tokens, p.head_tokens,
            p.tail_ratio, pycontext._budget(p, 0, p.token_scale) as budget
        into c
        from pycontext.source d
        cross join pycontext.profile p
        where d.is_default and p.profile = 'default';
        if not found then
            perform pycontext._no_such_chat(chat_id);
        end if;
    end if;
    s.chat_id := c.chat_id;
    s.source := c.source;
    s.profile := c.profile;
    s.encoding := c.encoding;
    s.token_scale := c.token_scale;
    s.image_tokens := c.image_tokens;
    s.head_tokens := c.head_tokens;
    s.tail_ratio := c.tail_ratio;
    s.act_no := c.act_no;
    s.edit_no := c.edit_no;
    s.hi_seq := c.last_seq;
    s.hi_act := c.act_no;
    s.total_hi := c.total_tokens;
    s.stub_hi := c.stub_total;
    s.turn_seq := c.request_seq;
    s.open_calls := c.open_calls;
    s.straddles := c.straddles;
    s.chat_head_from := c.head_seq;
    s.chat_head_to := c.head_to;
    s.chat_head_base := c.head_base;
    s.reset_seq := c.reset_seq;
    if c.source is not null then
        s.hi_seq := null;
        if as_of is not null then
            select max(r.seq) into s.hi_seq
            from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[4611686018427387904],
                null, 1, true, message_id => as_of) r;
            if s.hi_seq is null then
                perform pycontext._no_such_message(chat_id, as_of);
            end if;
            select coalesce(max(a.act_no), 0) into s.hi_act
            from pycontext.act a where a.chat_id = c.chat_id and a.at_seq < s.hi_seq;
        end if;
    elsif as_of is not null then
        select t.seq, t.line_no, t.at_act, t.running_total, t.running_stub, t.read_budget, t.read_excess, t.is_user,
            t.after_user into m
        from pycontext.message t where t.chat_id = c.chat_id and t.message_id = as_of;
        if not found then
            perform pycontext._no_such_message(chat_id, as_of);
        end if;
        s.hi_act := m.at_act;
        v_read := m.read_budget;
        v_excess := m.read_excess;
        if m.line_no > 0 then
            -- the state right after that line was placed
            select t.seq, t.running_total, t.running_stub, t.is_user, t.after_user into m
            from pycontext.act a
            join pycontext.message t on t.chat_id = a.chat_id and t.seq <= a.at_seq and t.line_no = 0
            where a.chat_id = c.chat_id and a.act_no = s.hi_act and t.at_act <= s.hi_act
                and (t.gone_act is null or t.gone_act > s.hi_act)
            order by t.seq desc limit 1;
        end if;
        s.hi_seq := m.seq;
        s.total_hi := m.running_total;
        s.stub_hi := m.running_stub;
        s.turn_seq := case when m.is_user then m.seq else m.after_user end;
    end if;
    if as_of is not null and c.source is null then
        select coalesce(range_agg(int8range((a.details ->> 'unit_seq')::bigint + 1, (a.details ->> 'seq')::bigint, '[]')), '{}')
        into s.straddles
        from pycontext.act a where a.chat_id = c.chat_id and a.act_no <= s.hi_act and a.act = 'late_result';
        -- rows that were there then have been set aside since: the head may have ended elsewhere
        if exists (select from pycontext.act a where a.chat_id = c.chat_id and a.act_no > s.hi_act and a.act = 'rewound'
                and (a.details ->> 'to_seq')::bigint < s.hi_seq) then
            s.chat_head_to := null;
        end if;
    end if;
    s.is_exact := as_of is null or v_read is not null and token_budget is null;
    s.act_arg := case when as_of is not null and c.source is null then s.hi_act end;

    if token_budget <= 0 then
        perform pycontext._raise('PCX05', 'token_budget must be more than 0', format('token_budget is %s', token_budget),
            'leave it out to take the profile''s');
    end if;
    s.token_budget := case when token_budget is null then coalesce(v_read, c.budget)
        else greatest(floor(token_budget / c.token_scale)::integer, 1) end;  -- too small is not none: it is told what would do
    if s.token_budget <= 0 then
        perform pycontext._raise('PCX05', 'reserve, tools and memory leave no room for messages',
            format('profile %L leaves %s tokens with tool_tokens %s', c.profile, c.budget, c.tool_tokens),
            'offer fewer tools, or choose a profile with a larger window');
    end if;
    s.profile_budget := case when c.budget > 0 then c.budget else s.token_budget end;

    -- newest line by place, a reset before a compaction of the same place
    if as_of is null then
        if c.line_seq is not null then
            select t.* into l from pycontext.message t
            where t.chat_id = c.chat_id and t.seq = c.line_seq and t.line_no = c.line_no;
            while l.origin = 'compaction' and c.source is not null and not pycontext._has_edge(l, c.source) loop
                s.stale_seq := l.seq;
                l := pycontext._line_before(c.chat_id, l.seq);
            end loop;
        end if;
    else
        select t.* into l from pycontext.message t
        where t.chat_id = c.chat_id and t.line_no > 0 and t.seq <= s.hi_seq and t.at_act <= s.hi_act
            and (t.gone_act is null or t.gone_act > s.hi_act)
        order by t.seq desc, t.origin = 'reset' desc, t.line_no desc limit 1;
    end if;
    s.line_seq := l.seq;
    s.line_id := l.message_id;
    s.line_origin := l.origin;
    s.line_content := l.content;
    s.line_tokens := l.tokens;
    s.line_encoding := l.encoding;
    s.line_covers_from := l.covers_from;
    s.line_created_at := l.created_at;
    s.line_total := coalesce(l.running_total, 0);
    s.request_seq := l.request_seq;
    s.head_from := l.head_from;
    s.head_to := l.head_to;
    -- a first turn over its limit is cut, but where it is the request that the line keeps
    if l.head_frozen is not null then
        s.is_head_cut := l.head_frozen > c.head_tokens and l.request_seq is distinct from l.head_from;
    end if;
    s.head_frozen := case when s.is_head_cut then c.head_tokens else l.head_frozen end;
    if l.request_seq = l.head_from then
        s.request_seq := null;
    end if;
    select t.content, t.tokens, t.encoding, t.created_at, greatest(t.tokens, t.frozen_tokens) as cost into q
    from pycontext.prompt t
    where t.chat_id = c.chat_id and t.act_no <= s.hi_act order by t.act_no desc limit 1;
    s.prompt := nullif(q.content, '');
    s.prompt_tokens := q.tokens;
    s.prompt_encoding := q.encoding;
    s.prompt_created_at := q.created_at;

    if as_of is null then
        s.prune_unit := c.prune_unit;
        s.prune_total := c.prune_total;
        s.prune_stub := c.prune_stub;
        s.prune_request := c.prune_request;
    else
        select (a.details ->> 'prune_unit')::bigint, (a.details ->> 'prune_total')::bigint,
            (a.details ->> 'prune_stub')::bigint, (a.details ->> 'prune_request')::bigint
        into s.prune_unit, s.prune_total, s.prune_stub, s.prune_request
        from pycontext.act a
        where a.chat_id = c.chat_id and a.act_no <= s.hi_act and a.details ? 'prune_unit'
        order by a.act_no desc limit 1;
    end if;
    if s.prune_unit <= coalesce(l.seq, 0) + 1 then
        s.prune_unit := null;  -- the line has gone past it
    end if;

    s.lo_seq := coalesce(l.seq, pycontext._origin(c.source));
    s.total_base := s.line_total;
    s.stub_base := coalesce(l.running_stub, 0);
    s.fixed_tokens := 3 + coalesce(q.cost, 0) + coalesce(greatest(l.tokens, l.frozen_tokens) + coalesce(s.head_frozen, 0)
        + coalesce(l.request_frozen, 0), 0);
    s.pins := case when as_of is null then c.pins else 1 end;
    s.has_open := as_of is not null or c.open_calls <> '{}' or c.pins > 0;
    if c.source is not null then
        s := pycontext._read_source(s);
        if s.hi_seq is null then
            -- nothing follows the line
            select max(r.seq) into s.hi_seq
            from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[s.lo_seq], null, 1,
                true) r;
            if s.hi_seq is null then
                perform pycontext._no_such_chat(chat_id);
            end if;
        end if;
        if s.walked_users is null then
            s := pycontext._read_request(s, coalesce((
                select max(x.seq) + 1 from pycontext.message x
                where x.chat_id = c.chat_id and x.line_no > 0 and x.origin = 'reset' and x.at_act <= s.hi_act
                    and x.seq <= s.hi_seq), pycontext._origin(c.source)), s.hi_seq);
        end if;
        s.turn_seq := s.walked_users[cardinality(s.walked_users)];
        s.has_open := s.has_open or l.origin = 'compaction';  -- what its head and request take was an estimate
        s.total_hi := 0;
        s.stub_hi := 0;
        s.stub_base := s.total_base;
        s.line_total := s.total_base;
    elsif s.has_open then
        -- room for the stand-ins of results that have not come
        if as_of is null then
            select count(*) into v_open from jsonb_each(c.open_calls) o
            where (o.value ->> 'seq')::bigint > s.lo_seq and not o.value ? 'interim';
        else
            v_open := pycontext._waiting_then(s);
        end if;
        s.fixed_tokens := s.fixed_tokens + 16 * v_open;
    end if;
    s.counted_tokens := 3 + coalesce(q.tokens, 0) + coalesce(l.tokens + coalesce(s.head_frozen, 0)
        + coalesce(l.request_frozen, 0), 0) + 16 * v_open + c.live_tokens;
    -- counts that turned out above what the totals hold
    s.fixed_tokens := s.fixed_tokens + case when as_of is null then c.excess_tokens else coalesce(v_excess, 0) end;
    if c.source is not null then
        s.counted_tokens := s.counted_tokens - s.total_base;
    end if;
    return s;
end
$$;

-- The same where only bounds are asked for, home and edit_no: of an adopted chat few rows are read.
create or replace function pycontext._chat_bounds(chat_id text)
returns pycontext._window_state
language sql stable
as $$
    select pycontext._chat_state(chat_id, 1000, null)
$$;

comment on function pycontext._chat_bounds(text) is
    'Private. The figures of a chat where none of its window is asked for.';

create or replace function pycontext._pinned_between(pins pycontext._pin_row[], after_unit bigint, before_unit bigint)
returns bigint
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    if pins is null then
        return 0;
    end if;
    return (select coalesce(sum(t.tokens), 0) from unnest(pins) t where t.unit_seq > after_unit and t.unit_seq < before_unit);
end
$$;

-- The pins that stand apart because their units lie before the first unit shown; where the request stands apart too,
-- it is shown as the request.
create or replace function pycontext._with_pins(s pycontext._window_state, pins pycontext._pin_row[], before_unit bigint)
returns pycontext._window_state
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    select array_agg(t.unit_seq order by t.unit_seq),
        array_agg(t.unit_seq order by t.unit_seq), coalesce(sum(t.tokens), 0)
    into s.pin_from, s.pin_to, s.pin_tokens
    from unnest(pins) t
    where t.unit_seq < before_unit and t.unit_seq is distinct from s.border_request;
    return s;
end
$$;

-- Decides how the window is made: full; prune (old results and images in one line, up to a border); omit (what lies
-- before the border, behind one marker); shorten (inside the tail). Borders move on a grid of the running totals.
create or replace function pycontext._window_state(chat_id text, token_budget integer, as_of text)
returns pycontext._window_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state := pycontext._chat_state(chat_id, token_budget, as_of);
    b pycontext._border_row;
    v_tail pycontext._border_row;
    v_row pycontext._place_row;
    v_request pycontext._place_row;
    v_avail bigint := s.token_budget - s.fixed_tokens;
    v_tail_tokens bigint := floor(s.tail_ratio * s.token_budget);
    v_grid numeric;
    v_total bigint;
    v_cost bigint;
    v_head_cut bigint := 0;
    v_before bigint := 0;
    v_kept bigint := 0;
    v_is_whole boolean := false;
    v_pins pycontext._pin_row[];
    v_shown bigint[];
    v_whole pycontext._window_state;
    v_room bigint;
    v_low bigint;
    v_high bigint;
    v_mid bigint;
begin
    s.mode := 'full';
    if s.pins > 0 then
        -- apart: those that no range of the window shows in place
        select array_agg(row(t.seq, t.message_id, t.unit_seq, t.to_seq, t.at_act, t.tokens)::pycontext._pin_row)
                filter (where (t.unit_seq between s.head_from and s.head_to) is not true
                    and t.unit_seq is distinct from s.request_seq),
            array_agg(t.unit_seq)
        into v_pins, s.pin_units
        from pycontext._pins_of(s) t
        where t.seq <= s.hi_seq;
        s := pycontext._with_pins(s, v_pins, s.lo_seq + 1);
        v_avail := v_avail - s.pin_tokens;
        if s.is_head_cut and s.head_from = any (s.pin_units) then
            s.is_head_cut := false;
            v_avail := v_avail + s.head_frozen - (pycontext._row_at(s, s.head_from)).frozen_tokens;
        end if;
    end if;
    if s.prune_unit is null and s.total_hi - s.total_base <= v_avail then
        return s;
    end if;

    if s.prune_unit is not null then
        -- the request of the pass keeps its images
        if s.prune_request > s.lo_seq then
            v_row := pycontext._row_at(s, s.prune_request);
            v_kept := v_row.frozen_tokens - v_row.stub_tokens;
        end if;
        v_whole := s;
        v_room := v_avail - v_kept - pycontext._pinned_between(v_pins, s.lo_seq, s.prune_unit);
    end if;
    -- The head stays; what is left out lies between it and the border.
    if s.line_origin is distinct from 'compaction' then
        if s.source is null and s.reset_seq = s.lo_seq and s.chat_head_to <= s.hi_seq then
            s.head_from := s.chat_head_from;
            s.head_to := s.chat_head_to;
        else
            if s.source is not null then
                s := pycontext._read_head(s);
            end if;
            select t.head_from, t.head_to, t.head_frozen into s.head_from, s.head_to, s.head_frozen
            from pycontext._head_range(s) t;
        end if;
        if s.head_to < s.hi_seq then
            if s.source is null then
                v_total := s.chat_head_base;
                if s.head_from is distinct from s.chat_head_from then
                    v_row := pycontext._row_at(s, s.head_from);
                    v_total := v_row.running_total - v_row.frozen_tokens;
                end if;
                v_row := pycontext._row_at(s, s.head_to);
                if v_total > s.total_base and s.straddles @> s.head_to + 1 then
                    -- its results come after the head, which they are no part of
                    s.marker_from := pycontext._first_seq(s);
                    v_before := v_total - s.total_base;
                elsif v_total - s.total_base <= s.head_tokens then
                    s.head_from := s.lo_seq + 1;  -- what stood before the first user message goes with it
                    v_total := s.total_base;
                elsif s.prune_unit > s.head_to + 1 and v_row.running_total - s.total_base + s.prune_stub - v_row.running_stub
                    + s.total_hi - s.prune_total + pycontext._pinned_between(v_pins, s.head_to, s.prune_unit)
                    + (case when s.prune_request > s.head_to then v_kept else 0 end) <= v_avail then
                    s.head_from := s.lo_seq + 1;  -- as long as it fits beside what the pass settled
                    v_total := s.total_base;
                    v_is_whole := true;
                else
                    s.marker_from := pycontext._first_seq(s);  -- too much of it: left out, so the marker starts there
                    v_before := v_total - s.total_base;
                end if;
                s.head_frozen := v_row.running_total - v_total;
                s.total_base := v_row.running_total;
                s.stub_base := v_row.running_stub;
            end if;
            if s.source is not null then
                if s.first_seq < s.head_from then
                    s.marker_from := s.first_seq;
                end if;
                if s.floor_seq <= s.head_to then
                    s.total_base := s.total_base + s.head_frozen;  -- the walk back went through the head
                end if;
                s.floor_seq := greatest(s.floor_seq, s.head_to + 1);
            end if;
            s.lo_seq := s.head_to;
            if not v_is_whole and (s.head_from = any (s.pin_units)) is not true then
                v_head_cut := greatest(s.head_frozen - s.head_tokens, 0);
            end if;
            v_avail := v_avail - s.head_frozen + v_head_cut;
        else
            s.head_from := null;
            s.head_to := null;
            s.head_frozen := null;
        end if;
    end if;

    if s.source is not null and s.lo_seq = pycontext._origin(s.source) then
        s.lo_seq := s.first_seq - 1;
    end if;
    if v_pins is not null then
        v_pins := array(select t from unnest(v_pins) t where (t.unit_seq between s.head_from and s.head_to) is not true);
    end if;

    -- what the last pruning pass settled stays: one border, until the next pass or a line goes past it
    if s.prune_unit is not null and (s.prune_unit <= s.lo_seq + 1 or s.marker_from is not null)
        and s.prune_stub - v_whole.stub_base + s.total_hi - s.prune_total <= v_room then
        -- it is from before the first user message, whose turn has become the head, or what stands before that goes with
        -- no head: as it was, without one
        s := v_whole;
        s.mode := 'prune';
        s.first_unit := s.prune_unit;
        return s;
    end if;
    if s.prune_unit <= s.lo_seq + 1 then
        s.prune_unit := null;
        s.prune_request := null;
        if s.marker_from is null and s.total_hi - s.total_base + v_head_cut <= v_avail then
            return s;
        end if;
    elsif s.prune_unit is not null and s.marker_from is null then
        if s.prune_request > s.lo_seq then
            v_request := pycontext._row_at(s, s.prune_request);
        end if;
        if s.prune_stub - s.stub_base + s.total_hi - s.prune_total + pycontext._pinned_between(v_pins, s.lo_seq, s.prune_unit)
            + coalesce(v_request.frozen_tokens - v_request.stub_tokens, v_head_cut) <= v_avail then
            s.mode := 'prune';
            s.first_unit := s.prune_unit;
            s.border_request := v_request.seq;  -- null: it is in the head
            s.is_head_cut := coalesce(s.is_head_cut, v_head_cut > 0 and s.border_request is not null);
            return s;
        end if;
    end if;

    -- one grid for both kinds of border: thirds of the profile's budget, halved for a smaller model; a foreign row
    -- has no frozen total to stand on
    v_grid := greatest(s.token_budget / 32, 1);
    if s.source is null then
        v_grid := pycontext._grid_budget(s.profile_budget, s.token_budget) / 3;
        while v_grid > greatest(v_avail / 2, 1) loop
            v_grid := v_grid / 2;
        end loop;
    end if;

    -- pruning alone, at the smallest border of the grid that does; the newest request before it keeps its images
    if s.source is null and s.marker_from is null and s.stub_hi - s.stub_base < s.total_hi - s.total_base then
        v_tail := pycontext._border(s, s.total_hi - v_tail_tokens);
        if v_tail.unit_seq is null then
            v_tail := pycontext._newest_unit(s);
        end if;
        if v_tail.start_stub - s.stub_base + s.total_hi - v_tail.start_total <= v_avail
            and v_tail.unit_seq > coalesce(s.prune_unit, 0) then
            v_low := greatest(ceil((s.total_hi - v_avail) / v_grid),
                floor(greatest(s.total_base, s.prune_total) / v_grid) + 1);
            v_high := floor(v_tail.start_total / v_grid);
            b := v_tail;
            loop
                v_request := pycontext._request_before(s, b.unit_seq, b.after_user, s.lo_seq);
                if b.start_stub - s.stub_base + s.total_hi - b.start_total + pycontext._pinned_between(v_pins, s.lo_seq, b.unit_seq)
                    + coalesce(v_request.frozen_tokens - v_request.stub_tokens, v_head_cut) <= v_avail then
                    s.mode := 'prune';
                    s.first_unit := b.unit_seq;
                    s.border_request := v_request.seq;
                    s.prune_request := null;
                    v_high := coalesce(v_mid - 1, v_high);
                else
                    exit when v_mid is null;
                    v_low := v_mid + 1;
                end if;
                exit when v_low > v_high;
                v_mid := (v_low + v_high) / 2;
                b := pycontext._border(s, ceil(v_mid * v_grid)::bigint);
            end loop;
            if s.mode = 'prune' then
                if v_pins is not null then
                    s := pycontext._with_pins(s, v_pins, s.lo_seq + 1);
                end if;
                s.is_head_cut := coalesce(s.is_head_cut, v_head_cut > 0 and s.border_request is not null);
                return s;
            end if;
        end if;
    end if;

    -- the smallest border that does; rows after it and before the pruning pass's border stay pruned
    v_high := ceil((s.total_hi - v_avail) / v_grid);
    v_low := case when s.prune_unit is null then v_high else floor(s.total_base / v_grid) + 1 end;
    while v_low < v_high and v_avail > 0 loop
        v_mid := (v_low + v_high) / 2;
        b := pycontext._border(s, ceil(v_mid * v_grid)::bigint);
        if b.unit_seq < s.prune_unit and s.prune_stub - b.start_stub + s.total_hi - s.prune_total
                + (case when s.prune_request >= b.unit_seq then v_kept else 0 end) > v_avail
            or b.unit_seq >= s.prune_unit and s.total_hi - b.start_total > v_avail then
            v_low := v_mid + 1;
        else
            v_high := v_mid;
        end if;
    end loop;
    v_total := ceil(v_high * v_grid);
    if v_pins is not null then
        select array_agg(r.seq) into v_shown
        from pycontext._thread_rows(s.chat_id, s.source, s.pin_units, s.pin_units, s.act_arg, walked => s.walked,
            walked_at => s.walked_at) r
        where r.seq <= s.hi_seq;
    end if;
    if s.floor_seq > s.lo_seq + 1 then
        b := pycontext._border(s, v_total);
        if (s.walked_users[1] < b.unit_seq) is not true then
            s := pycontext._read_request(s, s.lo_seq + 1, s.floor_seq - 1);
        end if;
    end if;
    loop
        b := null;
        if v_avail > 0 and v_total <= s.total_hi then
            b := pycontext._border(s, v_total);
        end if;
        if b.unit_seq is null or s.total_hi - b.start_total < v_tail_tokens then
            -- never past the tail
            if v_tail.unit_seq is null then
                v_tail := pycontext._border(s, s.total_hi - v_tail_tokens);
                if v_tail.unit_seq is null then
                    v_tail := pycontext._newest_unit(s);
                end if;
            end if;
            if b.unit_seq is null or b.unit_seq > v_tail.unit_seq then
                b := v_tail;
            end if;
        end if;
        v_cost := case when b.unit_seq < s.prune_unit then s.prune_stub - b.start_stub + s.total_hi - s.prune_total
            + pycontext._pinned_between(v_pins, b.unit_seq - 1, s.prune_unit)
            + case when s.prune_request >= b.unit_seq then v_kept else 0 end else s.total_hi - b.start_total end
            + pycontext._pinned_between(v_pins, s.lo_seq, b.unit_seq);
        v_request := pycontext._request_before(s, b.unit_seq, b.after_user, s.lo_seq);
        if v_cost + coalesce(v_request.frozen_tokens, v_head_cut) <= v_avail or b.unit_seq = v_tail.unit_seq then
            s.first_unit := b.unit_seq;
            s.marker_from := coalesce(s.marker_from, pycontext._first_seq(s));
            s.marker_tokens := b.start_total - s.total_base + v_before;
            s.border_request := v_request.seq;
            -- it is shown, right after the marker; so are pins, before it
            s.marker_tokens := greatest(s.marker_tokens - coalesce(v_request.frozen_tokens, 0)
                - pycontext._pinned_between(v_pins, s.marker_from - 1, v_request.seq)
                - pycontext._pinned_between(v_pins, coalesce(v_request.seq, s.marker_from - 1), s.first_unit), 0);
            s.marker_to := pycontext._marker_end(s, s.marker_from, s.first_unit, array_append(v_shown, v_request.seq));
            if s.marker_to between s.head_from and s.head_to then
                s.marker_to := pycontext._marker_end(s, s.marker_from, s.head_from, v_shown);
            end if;
            if v_pins is not null then
                s := pycontext._with_pins(s, v_pins, s.first_unit);
            end if;
            if v_cost + coalesce(v_request.frozen_tokens, v_head_cut)
                + pycontext._marker_cost(s.marker_from, s.marker_to, s.marker_tokens) <= v_avail then
                s.mode := 'omit';
                s.is_head_cut := coalesce(s.is_head_cut, v_head_cut > 0 and s.border_request is not null);
                return s;
            end if;
        end if;
        exit when b.unit_seq is not distinct from v_tail.unit_seq;
        v_total := v_total + ceil(v_grid);
    end loop;
    s.mode := 'shorten';
    if b.unit_seq is null then
        s.first_unit := s.hi_seq + 1;  -- no unit begins after the head
    end if;
    s.marker_tokens := coalesce(b.start_total, s.total_hi) - s.total_base + v_before;
    return s;
end
$$;
