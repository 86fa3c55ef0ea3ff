-- The structured summary as text. The headings speak of the past: nothing here asks for anything.
create or replace function pycontext._summary_text(summary jsonb)
returns text
language sql immutable parallel safe
as $$
    select string_agg(b.body, E'\n\n' order by b.n)
    from (
        select h.n, h.heading || E'\n' || string_agg('- ' || i.item, E'\n' order by i.n) as body
        from (values (1, 'resolved', 'What had been asked and done:'), (2, 'decisions', 'What had been decided:'),
            (3, 'pending', 'What was still open at that time:'), (4, 'facts', 'Exact values that were stated:'),
            (5, 'artifacts', 'Files, ids and addresses that were touched:')) h (n, key, heading)
        cross join lateral jsonb_array_elements_text(case jsonb_typeof(summary -> h.key)
            when 'array' then summary -> h.key else '[]' end) with ordinality i (item, n)
        where i.item ~ '\S'
        group by h.n, h.heading
        union all
        select 0, summary ->> 'notes' where summary ->> 'notes' ~ '\S'
        union all
        select 6, 'What was being worked on at that time: ' || (summary ->> 'active_task')
        where summary ->> 'active_task' ~ '\S') b
$$;

-- Most tokens a summary may take: a share of the budget, between 500 and 4000, never over an eighth of it.
create or replace function pycontext._summary_limit(p pycontext.profile, token_budget integer)
returns integer
language sql immutable parallel safe
as $$
    select least(greatest(floor(p.summary_ratio * token_budget), 500), 4000, token_budget / 8)::integer
$$;

-- Most tokens a line may take: the list of files, ids and addresses may add 500, up to an eighth of the budget.
create or replace function pycontext._line_limit(p pycontext.profile, token_budget integer)
returns integer
language sql immutable parallel safe
as $$
    select least(pycontext._summary_limit(p, token_budget) + 500, token_budget / 8)
$$;

-- Where more than max_rows rows of an adopted chat lie between its newest line and a border: the row after the first
-- max_rows, what these cost, roughly, and how far on a result may answer one of them.
create or replace function pycontext._source_piece(
    s pycontext._window_state, before_seq bigint, max_rows integer, out border_seq bigint, out tokens bigint,
    out to_seq bigint)
returns record
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(s.source);
    k pycontext._source_batch;
begin
    k := pycontext._fetch_source(f, s.chat_id, s.lo_seq + 1, before_seq - 1, max_rows, 'cut');
    if k.first_seq is not null then
        border_seq := k.first_seq;
        tokens := k.tokens;
        to_seq := border_seq;
        if 'tool_call_id' = any (f.has_columns) then
            k := pycontext._fetch_source(f, s.chat_id, border_seq, before_seq - 1, 512, 'oldest places');
            to_seq := coalesce(k.rows[cardinality(k.rows)].seq, border_seq);
        end if;
    end if;
end
$$;

-- One row: whether to compact now, why, and the cut. The cut columns are filled whenever something can be cut.
create or replace function pycontext.compaction_plan(chat_id text, token_budget integer default null)
returns setof pycontext.compaction_plan_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
declare
    s pycontext._window_state := pycontext._chat_state(chat_id, token_budget, null);
    p pycontext.profile;
    r pycontext.compaction_plan_row;
    b pycontext._border_row;
    v_tail pycontext._border_row;
    v_limit integer;
    v_head_to bigint;
    v_grid numeric;
    v_total bigint;
    v_keep bigint;
    v_unit bigint;
    v_straddled bigint;
    v_measure bigint;
    v_said text;
    v_base_total bigint := s.line_total;
    v_base_stub bigint := s.stub_base;
    v_saved bigint := 0;
    v_prune pycontext._border_row;
    v_gain bigint := 0;
    v_enough numeric;
    v_wait text;
    v_last pycontext._place_row;
    v_request pycontext._place_row;
    v_piece_seq bigint;
    v_piece_tokens bigint;
    v_piece_to bigint;
    v_covered bigint;
    v_told bigint;
    v_pruned bigint;
    v_shown bigint;
    v_left integer;
    c_piece constant integer := 2000;
begin
    select t.* into p from pycontext.profile t where t.profile = s.profile;
    r.token_budget := s.token_budget;
    r.edit_no := s.edit_no;
    r.trigger_tokens := least(floor(p.trigger_ratio * s.token_budget), p.trigger_tokens)::integer;
    r.target_tokens := floor(p.target_ratio * s.token_budget)::integer;
    r.summary_tokens := coalesce(s.line_tokens, 0);
    r.head_tokens := coalesce(s.head_frozen, 0);
    r.window_tokens := s.counted_tokens;
    v_measure := greatest(r.window_tokens, s.fixed_tokens + s.total_hi - s.line_total);
    v_limit := pycontext._line_limit(p, least(s.token_budget, s.profile_budget));
    if s.line_origin is distinct from 'compaction' then
        if s.source is null then
            v_head_to := s.chat_head_to;
            if v_head_to is not null then
                select sum(t.frozen_tokens), max(t.running_total), max(t.running_stub)
                into r.head_tokens, v_base_total, v_base_stub
                from pycontext._thread_rows(s.chat_id, null, array[s.chat_head_from], array[v_head_to]) t;
            end if;
        else
            s := pycontext._read_head(s);
            select q.head_to, q.head_frozen into v_head_to, r.head_tokens from pycontext._head_range(s) q;
        end if;
    end if;

    -- what the last pruning pass saves already
    if s.prune_unit > greatest(s.lo_seq, v_head_to) + 1 then
        v_saved := s.prune_total - v_base_total - (s.prune_stub - v_base_stub);
        if s.prune_request > greatest(s.lo_seq, v_head_to) then
            -- the request of that pass keeps its images
            v_saved := v_saved - (select q.frozen_tokens - q.stub_tokens from pycontext._row_at(s, s.prune_request) q);
        end if;
        r.window_tokens := r.window_tokens - v_saved;
        v_measure := v_measure - v_saved;
    end if;

    -- the protected tail; then, at or before its start, the first border of the grid that meets the target
    v_keep := r.target_tokens - 3 - coalesce(s.prompt_tokens, 0) - coalesce(r.head_tokens, 0) - v_limit;
    v_grid := 1;
    if s.source is null then
        v_grid := greatest(pycontext._grid_budget(s.profile_budget, s.token_budget) / 8, 1);
    end if;
    v_tail := pycontext._border(s, s.total_hi - floor(p.tail_ratio * s.token_budget)::bigint);
    if v_tail.unit_seq is null then
        v_tail := pycontext._newest_unit(s);
    end if;
    v_total := ceil(least(ceil((s.total_hi - v_keep) / v_grid), floor(v_tail.start_total / v_grid)) * v_grid);
    if v_total > s.line_total then
        b := pycontext._border(s, v_total);
    elsif s.line_seq is null then
        b := v_tail;
    end if;
    -- pruning would go as far as the grid's last border before the tail
    if s.source is null and floor(v_tail.start_total / v_grid) * v_grid > v_base_total then
        v_prune := pycontext._border(s, (floor(v_tail.start_total / v_grid) * v_grid)::bigint);
        v_gain := v_prune.start_total - v_base_total - (v_prune.start_stub - v_base_stub) - v_saved;
        if v_gain > 0 then
            r.prune_to_seq := v_prune.unit_seq - 1;
            r.prune_tokens := v_gain;
        end if;
    end if;
    -- a pass takes in so many rows and no more: a long stretch is told in several lines, and none holds the chat long
    if s.source is null and b.unit_seq > s.lo_seq + c_piece + 1 then
        b := pycontext._first_unit(s, s.lo_seq + c_piece + 1);
    elsif s.source is not null and v_measure > r.trigger_tokens then
        select q.border_seq, q.tokens, q.to_seq into v_piece_seq, v_piece_tokens, v_piece_to
        from pycontext._source_piece(s, b.unit_seq, c_piece) q;
        b.unit_seq := coalesce(v_piece_seq, b.unit_seq);
        s.hi_seq := coalesce(v_piece_to, s.hi_seq);
    end if;
    -- a call that still waits, and its unit, stay; so does a unit whose results lie on both sides
    select least(min((o.value ->> 'seq')::bigint), b.unit_seq) into v_unit
    from jsonb_each(s.open_calls) o
    where (o.value ->> 'seq')::bigint > s.lo_seq
        and (o.value ? 'pending' or (o.value ->> 'seq')::bigint > coalesce(s.turn_seq, 0));
    if s.source is not null then
        v_unit := least(pycontext._waiting_unit(s, b.unit_seq), b.unit_seq);
    end if;
    select lower(q) - 1 into v_straddled from unnest(s.straddles) q where q @> v_unit;
    v_unit := coalesce(v_straddled, v_unit);
    if v_unit < b.unit_seq then
        b := pycontext._first_unit(s, v_unit);
    end if;
    -- M is the newest row before the border
    if b.unit_seq > coalesce(v_head_to, s.lo_seq) + 1 then
        -- ids of a product may commit out of order: its youngest rows wait
        if s.source is null then
            select q.seq, q.message_id, q.unit_seq, q.is_user, q.running_total, q.running_stub, q.frozen_tokens, q.stub_tokens,
                q.after_user
            into v_last
            from pycontext._thread_rows(s.chat_id, null, array[s.lo_seq + 1], array[b.unit_seq - 1], null, 1, true) q;
        else
            v_last := pycontext._settled_row(s, b.unit_seq, p.settle_seconds);
        end if;
    end if;
    r.tail_tokens := s.total_hi - b.start_total;
    if v_last.seq > s.lo_seq and v_last.seq > coalesce(v_head_to, s.lo_seq) then
        -- the newest request at M stays in sight, in the place of the line's
        v_request := case when v_last.is_user then v_last
            else pycontext._request_before(s, v_last.seq + 1, v_last.after_user, greatest(s.lo_seq, v_head_to)) end;
        select m.request_frozen into v_left
        from pycontext.message m where m.chat_id = s.chat_id and m.message_id = s.line_id and v_request.seq is not null;
        v_covered := coalesce(v_piece_tokens, b.start_total - s.line_total)
            - case when s.line_origin is distinct from 'compaction' then coalesce(r.head_tokens, 0) else 0 end;
        -- as it stands in the window. A line with its fence is to take less: under a hundred tokens there is nothing to gain.
        -- Before a call that waits, far back in an adopted chat, nothing was counted
        v_told := greatest(v_covered - coalesce(v_request.frozen_tokens, 0), 0);
        v_pruned := least(v_saved, b.start_total - v_base_total - (b.start_stub - v_base_stub));
        v_shown := v_told - v_pruned;
        if s.pins > 0 then
            v_shown := v_shown - (
                select coalesce(sum(t.tokens), 0) from pycontext._pins_of(s) t
                where t.unit_seq > greatest(s.lo_seq, v_head_to) and t.unit_seq <= v_last.seq and t.unit_seq is distinct from v_request.unit_seq);
        end if;
        if v_covered <= 0 or v_shown >= 100 then
            r.from_seq := case when s.source is null or s.line_seq is not null then s.lo_seq + 1 end;
            r.to_seq := v_last.seq;
            r.after_message_id := v_last.message_id;
            r.covered_tokens := v_told;
            r.max_line_tokens := least(v_limit, greatest(least(v_shown * 2 / 3, v_shown - 70), 30) + r.summary_tokens);
            r.max_summary_tokens := least(r.max_line_tokens, pycontext._summary_limit(p, least(s.token_budget, s.profile_budget)));
            r.expected_tokens := greatest(r.max_line_tokens, r.window_tokens - r.covered_tokens - coalesce(v_left, 0)
                - r.summary_tokens + r.max_line_tokens
                + v_pruned);
        end if;
    end if;

    -- a pass that the next one follows at once breaks the prefix for nothing; over the budget any relief will do, and a
    -- summary that frees a tenth near it, since what is left out there breaks the prefix too
    v_enough := case when v_measure > s.token_budget then 0.9 * r.trigger_tokens
        else (r.trigger_tokens::bigint + r.target_tokens) / 2 end;
    select q.reason into v_wait from pycontext._compaction_backoff(s.chat_id) q;
    -- the window's tokens as they are counted now; rows that were estimated when they came may hold it over the trigger
    v_said := case when r.window_tokens > r.trigger_tokens or v_measure <= r.trigger_tokens then format('%s tokens', r.window_tokens)
        else format('%s tokens (%s as first estimated)', r.window_tokens, v_measure) end;
    if p.compaction_mode = 'off' then
        r.decision := 'none';
        r.reason := 'compaction is off in this chat''s profile';
    elsif v_measure <= r.trigger_tokens then
        r.decision := 'none';
        r.reason := format('%s, at or below the trigger of %s', v_said, r.trigger_tokens);
    elsif v_gain >= 0.1 * s.token_budget and v_measure - v_gain <= v_enough and p.compaction_mode = 'auto' then
        r.decision := 'prune';
        r.reason := format('%s are over the trigger of %s; old tool results, arguments and images hold %s of them',
            v_said, r.trigger_tokens, v_gain);
    elsif v_wait is not null then
        r.decision := 'skip';
        r.reason := format('%s are over the trigger of %s; %s', v_said, r.trigger_tokens, v_wait);
    elsif r.to_seq is null then
        r.decision := 'skip';
        r.reason := format('%s are over the trigger of %s, but what is left is protected: head, newest turn, tail, '
            'calls that wait', v_said, r.trigger_tokens);
    elsif r.window_tokens - r.expected_tokens < (case when v_measure > 0.9 * s.token_budget then 0.1 else 0.25 end) * s.token_budget then
        r.decision := 'skip';
        r.reason := format('a summary would free only %s of %s tokens', r.window_tokens - r.expected_tokens, r.window_tokens);
    elsif p.compaction_mode = 'warn' then
        r.decision := 'skip';
        r.reason := format('%s are over the trigger of %s; the profile only warns', v_said, r.trigger_tokens);
    else
        r.decision := 'summarize';
        r.reason := format('%s are over the trigger of %s', v_said, r.trigger_tokens);
    end if;
    return next r;
end
$$;

-- What a summary after message M is made of: the line before it, then the ORIGINAL rows up to M, oldest first.
create or replace function pycontext.compaction_source(chat_id text, after_message_id text)
returns setof pycontext.compaction_source_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state := pycontext._chat_bounds(chat_id);
    v_to bigint := pycontext._place_of(s, after_message_id);
    l pycontext.message := pycontext._line_before(chat_id, least(v_to, s.stale_seq));
    f pycontext._line_frame_row;
    v_digest text;
begin
    s.lo_seq := coalesce(l.seq, pycontext._origin(s.source));
    f := pycontext._line_frame(s, l, v_to);
    if s.source is not null then
        v_digest := pycontext._segment_digest(s.chat_id, s.source, s.lo_seq, v_to);
    end if;
    if l.origin = 'compaction' then
        return query select l.seq, l.message_id, l.kind, l.role, l.content, l.content #>> '{}', null::jsonb, null::text,
            null::text, l.tokens, l.created_at, false, false, l.summary, s.edit_no, false, v_digest;
        if l.request_seq is not null and f.request_seq is distinct from l.request_seq then
            -- stood in the window as a row of its own until now, and no summary has told it
            return query
            select r.seq, r.message_id, r.kind, r.role, r.content, pycontext._content_text(r.content), null::jsonb, null::text,
                r.name, r.tokens, r.created_at, false, false, null::jsonb, s.edit_no, r.is_user, v_digest
            from pycontext._thread_rows(chat_id, s.source, array[l.request_seq], array[l.request_seq], s.hi_act) r;
        end if;
    end if;
    return query
    select r.seq, r.message_id, r.kind, r.role, r.content, pycontext._content_text(r.content), r.tool_calls,
        r.tool_call_id, r.name, r.tokens, r.created_at,
        coalesce(r.unit_seq between f.head_from and f.head_to, false), coalesce(r.seq = f.request_seq, false), null::jsonb,
        s.edit_no, r.is_user, v_digest
    from pycontext._thread_rows(chat_id, s.source, array[s.lo_seq + 1], array[v_to]) r
    where r.seq <= v_to and (r.superseded_seq is null or case when s.source is null
        then not pycontext._is_superseded(r.chat_id, r.seq, r.unit_seq, r.tool_call_id, null, v_to)
        else r.superseded_seq > v_to end)
    order by r.unit_seq, r.seq;
end
$$;

-- The seq of a live message of this chat, or PCX02.
create or replace function pycontext._place_of(s pycontext._window_state, message_id text)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_seq bigint;
begin
    select r.seq into v_seq
    from pycontext._thread_rows(s.chat_id, s.source, array[pycontext._origin(s.source)], array[4611686018427387904], null,
        1, true, message_id => coalesce(_place_of.message_id, '')) r;
    if v_seq is null then
        perform pycontext._no_such_message(s.chat_id, message_id);
    end if;
    return v_seq;
end
$$;

-- The newest live line placed before a seq.
create or replace function pycontext._line_before(chat_id text, to_seq bigint)
returns pycontext.message
language sql stable
as $$
    select m from pycontext.message m
    where m.chat_id = _line_before.chat_id and m.line_no > 0 and m.gone_act is null and m.seq < to_seq
    order by m.seq desc, m.origin = 'reset' desc, m.line_no desc limit 1
$$;

-- What a line after M keeps in sight from before it: the head, and the newest real user message at M.
create or replace function pycontext._line_frame(s pycontext._window_state, l pycontext.message, to_seq bigint)
returns pycontext._line_frame_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext._line_frame_row;
    v_reset bigint := s.lo_seq;
    v_row pycontext._place_row;
begin
    s.hi_seq := to_seq;
    if l.origin = 'compaction' then
        f.head_from := l.head_from;
        f.head_to := l.head_to;
        f.head_frozen := l.head_frozen;
        select coalesce(max(m.seq), pycontext._origin(s.source)) into v_reset
        from pycontext.message m
        where m.chat_id = s.chat_id and m.line_no > 0 and m.origin = 'reset' and m.gone_act is null and m.seq < to_seq;
    elsif s.source is null and s.reset_seq = s.lo_seq and s.chat_head_to <= to_seq then
        f.head_from := s.chat_head_from;
        f.head_to := s.chat_head_to;
        select sum(r.frozen_tokens) into f.head_frozen
        from pycontext._thread_rows(s.chat_id, null, array[f.head_from], array[f.head_to]) r;
    else
        select t.head_from, t.head_to, t.head_frozen into f from pycontext._head_range(s) t;
    end if;
    v_row := pycontext._row_at(s, to_seq);
    if not v_row.is_user then
        v_row := pycontext._request_before(s, to_seq + 1, v_row.after_user, v_reset);
    end if;
    if (v_row.seq between f.head_from and f.head_to) is not true then
        f.request_seq := v_row.seq;
        f.request_frozen := v_row.frozen_tokens;
    elsif f.head_frozen > s.head_tokens then
        f.request_seq := f.head_from;  -- the head itself is the request: whole while this line is the newest
        f.request_frozen := 0;
    end if;
    return f;
end
$$;

-- Places a line after M under the chat's lock and brings the chat's figures up to date. The id is derived from
-- (chat, M, origin, how many such lines at M are gone), so a retry, or a second tab, meets the row that is there.
create or replace function pycontext._place_line(
    s pycontext._window_state, place bigint, origin text, content jsonb, summary jsonb, segment jsonb, frame pycontext._line_frame_row)
returns pycontext.message
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    r pycontext.message;
    v_winner pycontext.message;
    v_end record;
    v_after record;
    v_line_seq bigint;
    v_line_no smallint;
    v_is_far boolean;
    v_gone bigint;
    v_now timestamptz := clock_timestamp();
    v_rows bigint;
begin
    select t.* into c from pycontext.chat t where t.chat_id = s.chat_id;
    v_line_seq := coalesce(c.line_seq, 0);
    v_line_no := c.line_no;
    select count(*) into v_gone
    from pycontext.message t
    where t.chat_id = c.chat_id and t.seq = place and t.line_no > 0 and t.origin = _place_line.origin and t.gone_act is not null;
    r.chat_id := c.chat_id;
    r.tenant := c.tenant;
    r.seq := place;
    r.kind := 'summary';
    r.role := 'user';
    r.unit_seq := place;
    r.origin := origin;
    r.message_id := 'sum_' || encode(substring(sha256(convert_to(
        jsonb_build_array(c.chat_id, place, origin, v_gone)::text, 'UTF8')) from 1 for 12), 'hex');
    r.content := content;
    r.summary := summary;
    r.segment := segment;
    r.head_from := frame.head_from;
    r.head_to := frame.head_to;
    r.head_frozen := frame.head_frozen;
    r.request_seq := frame.request_seq;
    r.request_frozen := frame.request_frozen;
    r.covers_from := (summary #>> '{covers,from_seq}')::bigint;
    r.digest := pycontext._digest('user', content, null, null, null);
    r.tokens := 4 + pycontext.estimate_tokens(pycontext._line_text(origin, r.covers_from, place, content #>> '{}'));
    r.frozen_tokens := r.tokens;
    r.stub_tokens := r.tokens;
    r.images := 0;
    r.calls := 0;
    r.reasoning_tokens := 0;
    r.is_user := false;
    r.is_plain := true;
    r.has_fence := false;
    r.created_at := v_now;
    r.at_act := c.act_no + 1;
    -- totals of M itself: where the tail after this line begins
    if c.source is null then
        select x.running_total, x.running_stub into v_end
        from pycontext.message x where x.chat_id = c.chat_id and x.seq = place and x.line_no = 0;
        r.running_total := coalesce(v_end.running_total, 0);
        r.running_stub := coalesce(v_end.running_stub, 0);
    else
        r.running_total := 0;
        r.running_stub := 0;
    end if;
    select coalesce(max(x.line_no), 0) + 1 into r.line_no
    from pycontext.message x where x.chat_id = c.chat_id and x.seq = place and x.line_no > 0;
    insert into pycontext.message values (r.*) on conflict on constraint message_id_uq do nothing;
    get diagnostics v_rows = row_count;
    if v_rows = 0 then
        -- a new statement: it sees the row that won
        select x.* into v_winner from pycontext.message x where x.chat_id = c.chat_id and x.message_id = r.message_id;
        return v_winner;
    end if;
    c.act_no := r.at_act;
    insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details)
    values (c.chat_id, c.act_no, c.tenant, case origin when 'reset' then 'reset' else 'summarized' end,
        s.hi_seq, jsonb_build_object('summary_id', r.message_id, 'to_seq', place));
    if (place, origin = 'reset') >= (coalesce(c.line_seq, -4611686018427387904), exists (
        select from pycontext.message x where x.chat_id = c.chat_id and x.seq = c.line_seq and x.line_no = c.line_no
            and x.origin = 'reset')) then
        c.line_seq := place;
        c.line_no := r.line_no;
    end if;
    if c.source is null then
        -- figures of what follows the newest line: counted, or what the line took in taken off, whichever is less to read
        v_is_far := c.last_seq - c.line_seq > c.line_seq - v_line_seq;
        select coalesce(sum(x.tokens), 0) as live, coalesce(sum(greatest(x.tokens - x.frozen_tokens, 0)), 0) as excess
        into v_after
        from pycontext._thread_rows(c.chat_id, null, array[case when v_is_far then v_line_seq else c.line_seq end + 1],
            array[case when v_is_far then c.line_seq else c.last_seq end]) x;
        c.live_tokens := case when v_is_far then c.live_tokens - v_after.live else v_after.live end;
        c.excess_tokens := case when v_is_far
            then c.excess_tokens - v_after.excess - pycontext._kept_excess(c.chat_id, v_line_seq, v_line_no) else v_after.excess end
            + pycontext._kept_excess(c.chat_id, c.line_seq, c.line_no);
        c.straddles := c.straddles * int8multirange(int8range(c.line_seq + 1, null));
    end if;
    if origin = 'reset' then
        c.reset_seq := greatest(c.reset_seq, place);
        c.head_seq := null;
        c.head_to := null;
        c.is_head_open := true;
        if c.request_seq <= place then
            c.request_seq := null;
        end if;
    end if;
    update pycontext.chat x
    set act_no = c.act_no, line_seq = c.line_seq, line_no = c.line_no, live_tokens = c.live_tokens,
        excess_tokens = c.excess_tokens, straddles = c.straddles, reset_seq = c.reset_seq, head_seq = c.head_seq, head_to = c.head_to,
        is_head_open = c.is_head_open, request_seq = c.request_seq, updated_at = v_now
    where x.chat_id = c.chat_id;
    return r;
end
$$;

create or replace function pycontext._log_pass(
    c pycontext.chat, outcome text, reason text, from_seq bigint, to_seq bigint, summary_id text, token_budget integer,
    tokens_before integer, tokens_after integer, details jsonb, at_seq bigint)
returns void
language sql volatile
as $$
    insert into pycontext.pass (chat_id, pass_no, tenant, act_no, at_seq, outcome, reason, trigger, from_seq, to_seq,
        summary_id, token_budget, tokens_before, tokens_after, model, calls, prompt_tokens, completion_tokens, seconds, lost_values, limits)
    select c.chat_id, coalesce((select max(t.pass_no) from pycontext.pass t where t.chat_id = c.chat_id), 0) + 1, c.tenant,
        (select t.act_no from pycontext.chat t where t.chat_id = c.chat_id), at_seq, outcome, left(reason, 500),
        details ->> 'trigger', from_seq, to_seq, summary_id, token_budget, tokens_before, tokens_after,
        details ->> 'model', (details ->> 'calls')::integer, (details ->> 'prompt_tokens')::integer,
        (details ->> 'completion_tokens')::integer, (details ->> 'seconds')::numeric, (details ->> 'lost_values')::integer,
        (select to_jsonb(p) - 'profile' - 'tenant' from pycontext.profile p where p.profile = c.profile)
$$;

-- Stores the summary of everything up to message M as a row of the chat, once: the row that is there wins and is
-- returned. Checked before anything is written (PCX07): stale edit_no, empty, headings only, a fence, too large. With a
-- holder: its lease is taken back in the same transaction, PCX08 where another one has taken it.
create or replace function pycontext.put_summary(
    chat_id text, after_message_id text, summary jsonb, segment jsonb default null, edit_no bigint default null,
    token_budget integer default null, details jsonb default null, holder text default null)
returns pycontext.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    s pycontext._window_state;
    l pycontext.message;
    r pycontext.message;
    f pycontext._line_frame_row;
    p pycontext.profile;
    v_to bigint;
    v_text text;
    v_tokens integer;
    v_line integer;
    v_pinned bigint[];
    v_covered bigint;
    v_rows bigint;
    v_first bigint;
    v_before integer;
    v_after integer;
    v_limit integer;
    v_live boolean;
begin
    c := pycontext._lock_chat(chat_id, false);
    s := pycontext._chat_state(chat_id, token_budget, null);
    select t.* into p from pycontext.profile t where t.profile = s.profile;
    begin
        v_to := pycontext._place_of(s, after_message_id);
    exception when sqlstate 'PCX02' then
        if edit_no is null then
            raise;
        end if;
        -- it was planned: a product's row is gone, and nobody said so
        perform pycontext._raise('PCX07', 'stale: the message that the summary is to stand after is gone',
            format('message_id is %L', after_message_id), 'plan again: select * from pycontext.compaction_plan(chat_id)');
    end;
    if edit_no is not null and edit_no <> c.edit_no then
        perform pycontext._raise('PCX07', 'stale: the chat was edited while the summary was written',
            format('edit_no was %s, is %s', edit_no, c.edit_no), 'plan again: select * from pycontext.compaction_plan(chat_id)');
    end if;
    if s.stale_seq is not null then
        perform pycontext._drop_stale(c, s.stale_seq);
        c := pycontext._lock_chat(chat_id, false);
        s := pycontext._chat_state(chat_id, token_budget, null);
    end if;
    if c.source is not null and details ->> 'digest' is not null and details ->> 'digest' is distinct from (case
            when pycontext._is_seq(split_part(details ->> 'digest', ':', 1)) then pycontext._segment_digest(c.chat_id, c.source,
                split_part(details ->> 'digest', ':', 1)::bigint, v_to) end) then
        perform pycontext._raise('PCX07', 'stale: messages changed while the summary was written',
            format('of those up to %L (#%s)', after_message_id, v_to),
            'plan again: select * from pycontext.compaction_plan(chat_id)');
    end if;
    v_live := exists (
        select from pycontext.message m
        where m.chat_id = c.chat_id and m.seq = v_to and m.origin = 'compaction' and m.gone_act is null);
    if v_live then
        -- a retry, or the tab that came second: the winner's text
        select m.* into r from pycontext.message m
        where m.chat_id = c.chat_id and m.seq = v_to and m.origin = 'compaction' and m.gone_act is null;
        perform pycontext._settle_lease(c, holder, 'met');
        return r;
    end if;
    perform pycontext._settle_lease(c, holder, 'summarized');
    if jsonb_typeof(summary) is distinct from 'object' then
        perform pycontext._raise('PCX07', 'a summary must be an object', format('got %s', coalesce(jsonb_typeof(summary), 'null')),
            'pass {"resolved": […], "pending": […], "active_task": …, "decisions": […], "facts": […], "artifacts": […], "notes": …}');
    end if;
    summary := pycontext._masked(summary);
    segment := pycontext._masked(segment);
    v_text := pycontext._summary_text(summary);
    if v_text is null or not pycontext._has_text(v_text) then
        perform pycontext._raise('PCX07', 'the summary is empty', format('keys: %s', (
            select string_agg(k, ', ') from jsonb_object_keys(summary) k)), 'nothing was stored; try again with content');
    end if;
    if pycontext._has_fence(v_text) then
        perform pycontext._raise('PCX07', 'the summary contains a fence tag', format('in a text of %s characters', length(v_text)),
            'take the tag out');
    end if;
    l := pycontext._line_before(chat_id, v_to);
    s.lo_seq := coalesce(l.seq, pycontext._origin(c.source));
    f := pycontext._line_frame(s, l, v_to);
    -- what is pinned stays in sight beside the line
    v_pinned := array(select t.unit_seq from pycontext.pin t where t.chat_id = c.chat_id and t.gone_act is null);
    if c.source is null then
        -- narrow columns alone: a caller of his own may take in any stretch. What was pruned stands there in one line
        select count(*), min(q.seq), coalesce(sum(case when q.unit_seq < c.prune_unit then q.stub_tokens else q.tokens end) filter (
            where not coalesce(q.unit_seq between f.head_from and f.head_to, false) and q.seq is distinct from f.request_seq
                and q.unit_seq <> all (v_pinned)), 0)
        into v_rows, v_first, v_covered
        from pycontext._stored_row q
        where q.chat_id = c.chat_id and q.unit_seq between s.lo_seq + 1 and v_to and q.line_no = 0 and q.gone_act is null;
    else
        select count(*), min(q.seq), coalesce(sum(q.tokens) filter (where not coalesce(q.unit_seq between f.head_from and f.head_to, false)
            and q.seq is distinct from f.request_seq and q.unit_seq <> all (v_pinned)), 0)
        into v_rows, v_first, v_covered
        from pycontext._thread_rows(chat_id, c.source, array[s.lo_seq + 1], array[v_to]) q;
    end if;
    if c.straddles @> v_to + 1 or c.source is null and exists (
            select from pycontext._stored_row q
            where q.chat_id = c.chat_id and q.seq between v_to + 1 and v_to + 200 and q.line_no = 0 and q.gone_act is null
                and q.unit_seq <= v_to)
        or c.source is not null and pycontext._splits_unit(c.chat_id, c.source, v_to) then
        perform pycontext._raise('PCX07', 'the cut would split a call from its results',
            format('after message %L (#%s)', after_message_id, v_to), 'cut after a whole unit, as compaction_plan does');
    end if;
    s.turn_seq := null;
    if c.source is not null and pycontext._waiting_unit(s, v_to + 1) is not null or exists (
        select from jsonb_each(c.open_calls) o where o.value ? 'pending' and (o.value ->> 'seq')::bigint between s.lo_seq + 1 and v_to) then
        perform pycontext._raise('PCX07', 'the cut takes in a call that waits for a person',
            format('after message %L (#%s)', after_message_id, v_to), 'cut before it, as compaction_plan does');
    end if;
    v_first := case when l.origin = 'compaction' then l.covers_from else coalesce(v_first, v_to) end;
    v_tokens := pycontext.estimate_tokens(v_text);
    v_limit := pycontext._line_limit(p, least(s.token_budget, s.profile_budget));
    -- the window never grows: by the caller's count of the text, where there is one, or by the estimate, on the safe side.
    -- What a tokenizer finds within the limit passes
    v_line := 4 + pycontext.estimate_tokens(pycontext._line_text('compaction', v_first, v_to, v_text));
    if details ->> 'line_tokens' ~ '^[0-9]{1,9}$' then
        v_line := v_line - v_tokens + greatest((details ->> 'line_tokens')::integer, v_tokens / 2);
    end if;
    if v_tokens > v_limit * 1.5 or v_line >= v_covered + coalesce(l.tokens, 0) then
        perform pycontext._raise('PCX07', 'the summary is larger than it may be or than what it replaces',
            format('it takes %s tokens, may take about %s, and replaces %s', v_line, floor(v_limit * 1.5),
                v_covered + coalesce(l.tokens, 0)),
            'make it shorter; nothing was stored');
    end if;
    summary := summary || jsonb_build_object('covers', jsonb_build_object(
        'from_seq', v_first, 'to_seq', v_to, 'rows', v_rows) || case when c.source is null then '{}' else jsonb_build_object(
            'digest', pycontext._segment_digest(c.chat_id, c.source, s.lo_seq, v_to),
            'edge', pycontext._segment_edge(c.chat_id, c.source, s.lo_seq, v_to)) end);
    select q.window_tokens into v_before from pycontext.compaction_plan(chat_id, token_budget) q;
    r := pycontext._place_line(s, v_to, 'compaction', to_jsonb(v_text), summary, segment, f);
    select q.window_tokens into v_after from pycontext.compaction_plan(chat_id, token_budget) q;
    if c.source is not null then
        -- far over its budget a window of theirs is read, and counted, in part
        v_before := greatest(v_before, v_after - r.tokens + v_covered + coalesce(l.tokens, 0));
    end if;
    perform pycontext._log_pass(c, 'summarized', details ->> 'reason',
        case when l.seq is null then v_first else l.seq + 1 end, v_to, r.message_id, s.token_budget,
        v_before, v_after, coalesce(details, '{}') || jsonb_build_object('lost_values', case when v_rows <= 5000 then (
            select count(*) from pycontext._lost_values(r, false, 1000)) end), s.hi_seq);
    perform pycontext._take_scale(c.chat_id);
    return r;
end
$$;

-- The pass without a model: tool results, long call arguments and images before the newest border of the grid are
-- sent in one line from now on. Only where it gains a tenth of the budget. Returns the pass; null where it did nothing.
create or replace function pycontext.prune_chat(chat_id text, token_budget integer default null)
returns pycontext.pass
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    s pycontext._window_state;
    b pycontext._border_row;
    r pycontext.compaction_plan_row;
    v_request pycontext._place_row;
    v_pass pycontext.pass;
    v_now timestamptz := clock_timestamp();
begin
    c := pycontext._lock_chat(chat_id, false);
    select q.* into r from pycontext.compaction_plan(chat_id, token_budget) q;
    if r.prune_to_seq is null or r.prune_tokens < 0.1 * r.token_budget then
        return null;
    end if;
    s := pycontext._chat_state(chat_id, token_budget, null);
    b := pycontext._first_unit(s, r.prune_to_seq + 1);
    v_request := pycontext._request_before(s, b.unit_seq, b.after_user, s.lo_seq);
    c.act_no := c.act_no + 1;
    insert into pycontext.act (chat_id, act_no, tenant, act, at_seq, details, created_at)
    values (c.chat_id, c.act_no, c.tenant, 'pruned', c.last_seq, jsonb_build_object('prune_unit', b.unit_seq,
        'prune_total', b.start_total, 'prune_stub', b.start_stub, 'prune_request', v_request.seq), v_now);
    update pycontext.chat t
    set act_no = c.act_no, prune_unit = b.unit_seq, prune_total = b.start_total, prune_stub = b.start_stub,
        prune_request = v_request.seq, updated_at = v_now
    where t.chat_id = c.chat_id;
    perform pycontext._log_pass(c, 'pruned', r.reason, s.lo_seq + 1, r.prune_to_seq, null, r.token_budget, r.window_tokens,
        (select q.window_tokens from pycontext.compaction_plan(prune_chat.chat_id, prune_chat.token_budget) q), null, s.hi_seq);
    perform pycontext._take_scale(c.chat_id);
    select t.* into v_pass from pycontext.pass t where t.chat_id = c.chat_id order by t.pass_no desc limit 1;
    return v_pass;
end
$$;

-- Logs an attempt that stored nothing: outcome failed or skipped, and why. No content is kept. A failure puts off the
-- next automatic pass; the same skip again, and a skip while a failure is waited out, is logged once. Frees the lease.
create or replace function pycontext.fail_compaction(
    chat_id text, after_message_id text, outcome text, reason text, details jsonb default null, holder text default null)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    r pycontext.compaction_plan_row;
    v_to bigint;
begin
    if outcome is null or outcome not in ('failed', 'skipped') then
        perform pycontext._raise('PCX02', 'outcome must be failed or skipped', format('outcome is %L', outcome),
            'a summary that was stored is logged by put_summary');
    end if;
    c := pycontext._lock_chat(chat_id, false);
    select p.* into r from pycontext.compaction_plan(chat_id, (details ->> 'token_budget')::integer) p;
    v_to := case when after_message_id is not null
        then pycontext._place_of(pycontext._chat_bounds(chat_id), after_message_id) else r.to_seq end;
    if outcome = 'failed' or details ->> 'model' is not null or not exists (
        select from (
            select t.outcome, t.trigger, t.reason, t.model from pycontext.pass t
            where t.chat_id = c.chat_id order by t.pass_no desc limit 1) q
        where q.outcome = 'failed' or q.outcome = 'skipped' and q.model is null
            and q.trigger is not distinct from details ->> 'trigger'
            and regexp_replace(q.reason, '[0-9]+', '', 'g') = regexp_replace(left(fail_compaction.reason, 500), '[0-9]+', '', 'g')) then
        perform pycontext._log_pass(c, outcome, reason, r.from_seq, v_to, null, r.token_budget, r.window_tokens,
            r.window_tokens, details, c.last_seq);
    end if;
    perform pycontext._settle_lease(c, holder, outcome);
end
$$;

-- "Start over": a line after the newest message; nothing from before it reaches the model any more.
create or replace function pycontext.start_over(chat_id text, note text default null)
returns pycontext.message
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    s pycontext._window_state;
    f pycontext._line_frame_row;
    v_place bigint;
begin
    c := pycontext._lock_chat(chat_id, false);
    s := pycontext._chat_state(chat_id, null, null);
    select r.seq into v_place
    from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[s.hi_seq], null, 1, true) r
    order by r.seq desc limit 1;
    if v_place is null then
        perform pycontext._raise('PCX02', 'there is nothing to start over from', format('chat %L has no message', chat_id),
            'append a message first');
    end if;
    note := pycontext._mask(note);
    if pycontext._has_fence(note) then
        note := pycontext._escape_fences(note);
    end if;
    return pycontext._place_line(s, v_place, 'reset', to_jsonb(coalesce(note, '')),
        jsonb_build_object('covers', jsonb_build_object('to_seq', v_place)), null, f);
end
$$;

create or replace view pycontext.compaction_history with (security_invoker = true) as
select p.chat_id, p.pass_no, p.created_at, p.outcome, p.trigger, p.from_seq, p.to_seq, p.tokens_before, p.tokens_after,
    p.tokens_before - p.tokens_after as saved_tokens, p.token_budget, p.model, p.calls, p.prompt_tokens,
    p.completion_tokens, p.seconds, p.summary_id, p.reason, p.lost_values, p.at_seq
from pycontext.pass p;
