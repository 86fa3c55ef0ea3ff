-- Why a row is in the window, or is not. Made of the window's own rows, so that it cannot say anything else.

create or replace view pycontext.explain_row as
select
    null::bigint as seq, null::text as preview, null::text as fate, null::text as by, null::text as reason,
    null::integer as tokens, null::integer as stored, null::text as role, null::text as section,
    null::text as message_id
where false;
comment on view pycontext.explain_row is
    'Row type of explain_window. The first six columns are for reading: they take 120 columns of a terminal.';
comment on column pycontext.explain_row.seq is
    'Place in the thread; null for what only the window has: system prompt, marker, stand-in.';
comment on column pycontext.explain_row.preview is 'Beginning of the stored text, or the words that were searched for.';
comment on column pycontext.explain_row.fate is
    'Sent: system, head, pinned, summary, marker, request, kept, stand-in; pruned (in one line) and shortened (cut). Not '
    'sent: summarized, merged (a line told on in a later one), left out, replaced (by a later result), set aside, not used '
    'and dropped line (lines). not shown: older rows that this call did not look at.';
comment on column pycontext.explain_row.by is
    'Whose doing it is: the id of a line, "pass N" (compaction_history), "act N", "#N" (a message), or "budget".';
comment on column pycontext.explain_row.reason is 'Why, in a few words. Of what a summary lacks it says whether a fact has the words that were searched for: recall tells it.';
comment on column pycontext.explain_row.tokens is 'What it takes in the window; 0 = it is not sent.';
comment on column pycontext.explain_row.stored is 'What it takes as it was stored; null for what only the window has.';
comment on column pycontext.explain_row.role is 'Who said it, as it was stored.';
comment on column pycontext.explain_row.section is 'Section of the window it stands in; null = none.';
comment on column pycontext.explain_row.message_id is 'The row''s own id: what message_original, pins and drop_summary go by.';

-- All rows up to to_seq, about max_rows of them, the newest: live or gone, lines too. Of a source those it has now.
create or replace function pycontext._all_rows(s pycontext._window_state, to_seq bigint, max_rows integer)
returns setof pycontext._thread_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
begin
    if s.source is null then
        -- a native seq is a counter: a range of it holds so many rows, and some lines
        return query
        select 0, r.* from pycontext._stored_row r
        where r.chat_id = s.chat_id and r.seq between to_seq - max_rows + 1 and to_seq and r.at_act <= s.hi_act;
    else
        return query
        with rows as materialized (
            select t.* from pycontext._thread_rows(s.chat_id, s.source, array[pycontext._origin(s.source)], array[to_seq],
                null, max_rows, true) t
        )
        select q.* from rows q
        union all
        select 0, r.* from pycontext._stored_row r
        where r.chat_id = s.chat_id and r.line_no > 0 and r.at_act <= s.hi_act and r.seq <= to_seq
            and r.seq >= case when (select count(*) from rows) < max_rows then pycontext._origin(s.source)
                else (select min(q.seq) from rows q) end;
    end if;
end
$$;

-- A few words of a text for a column of 24, from the first of the words if there are any. Wide letters take two.
create or replace function pycontext._preview(body text, words text[])
returns text
language sql immutable parallel safe
as $$
    select left(t.line, case when left(t.line, 24) ~ '[\u1100-\U0010FFFF]' then 12 else 24 end)
    from (
        select btrim(regexp_replace(regexp_replace(substr(body, greatest(coalesce(
            (select min(strpos(pycontext._folded(body), w)) from unnest(words) w), 1) - 4, 1), 400),
            '[\s\x01-\x1F\x7F-\x9F]+', ' ', 'g'), '[\u200B-\u200F\u2028-\u202E\u2060-\u2069]', '', 'g')) as line) t
$$;

-- The fate of every row of a chat, lines included, oldest first, in the window of that budget and time. search: only
-- rows that hold all its words. The newest max_rows before before_seq; a row "not shown" tells where to go on. PCX01, PCX05.
create or replace function pycontext.explain_window(
    chat_id text, token_budget integer default null, as_of text default null, search text default null,
    before_seq bigint default null, max_rows integer default 1000)
returns setof pycontext.explain_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set max_parallel_workers_per_gather = 0
as $$
declare
    s pycontext._window_state := pycontext._window_state(chat_id, token_budget, as_of);
    v_window pycontext.window_row[] := array(
        select w from pycontext.working_window(explain_window.chat_id, explain_window.token_budget, explain_window.as_of) w);
    v_words text[];
    v_rows pycontext._thread_row[];
    v_found pycontext._thread_row[] := '{}';
    v_left integer := greatest(coalesce(max_rows, 1000), 1);
    v_batch integer := least(greatest(coalesce(max_rows, 1000), 1), 1000);
    v_looked integer := 0;
    v_to bigint := least(before_seq - 1, case when s.source is null or as_of is not null then s.hi_seq else 4611686018427387904 end);
    v_top bigint := v_to;
    v_low bigint := v_to + 1;
    v_cut bigint;
    v_is_all boolean := false;
    v_has_line boolean := exists (select from unnest(v_window) w where w.kind = 'summary');
    v_marker bigint := (select max(w.seq) from unnest(v_window) w where w.section = 'omitted');
    v_kept text := '';
begin
    select array_agg(distinct t.word) into v_words
    from regexp_split_to_table(pycontext._folded(replace(search, U&'\3000', ' ')), '\s+') t (word)
    where t.word <> '';
    if v_words is not null and exists (
        select from pycontext.chat c cross join lateral pycontext._facts(c.chat_id, c.tenant, c.owner) q
        where c.chat_id = s.chat_id and (
            select bool_and(strpos(pycontext._folded((q.fact).content), w) > 0) from unnest(v_words) w)) then
        v_kept := ', a fact has them';  -- lost_values leaves out what recall can tell
    end if;
    while v_left > 0 and v_looked < 100000 and not v_is_all loop
        select array_agg(r order by r.seq, r.line_no), count(*) filter (where r.line_no = 0) < v_batch
        into v_rows, v_is_all
        from pycontext._all_rows(s, v_to, v_batch) r;
        if s.source is null then
            v_is_all := v_to <= v_batch;
        end if;
        v_low := case when s.source is null then v_to - v_batch + 1 else v_rows[1].seq end;
        if v_words is not null then
            v_rows := array(
                select r from unnest(v_rows) r
                cross join lateral (select pycontext._folded(pycontext._searched_text(r.content, r.tool_calls)) as body) t
                where (select bool_and(strpos(t.body, w) > 0) from unnest(v_words) w)
                order by r.seq, r.line_no);
        end if;
        if cardinality(v_rows) > v_left then
            v_cut := v_rows[cardinality(v_rows) - v_left + 1].seq;  -- what stands at one seq stays together
            v_is_all := v_is_all and v_cut = v_rows[1].seq;
            v_low := v_cut;
            v_rows := array(select r from unnest(v_rows) r where r.seq >= v_cut order by r.seq, r.line_no);
        end if;
        v_found := v_rows || v_found;
        v_left := v_left - coalesce(cardinality(v_rows), 0);
        v_looked := v_looked + v_batch;
        v_to := v_low - 1;
    end loop;
    return query
    select q.seq, q.preview, q.fate, q.cause, q.reason, q.tokens, q.stored, q.role, q.section, q.message_id
    from (
        select r.seq as place, r.line_no::integer as line_no, r.seq,
            coalesce(nullif(pycontext._preview(pycontext._searched_text(r.content, r.tool_calls), v_words), ''), '(empty)')
                as preview,
            f.fate, f.cause, f.reason || case when f.fate = 'summarized' and f.reason ~ '^(the summary lacks|lost) ' then v_kept
                else '' end as reason, coalesce((d.w).tokens, 0) as tokens, r.tokens as stored, r.role, (d.w).section,
            r.message_id
        from unnest(v_found) r
        -- an equality: both may be long
        left join (
            select w, w.kind = 'summary' as is_line, case w.kind when 'summary' then w.message_id else w.seq::text end as place
            from unnest(v_window) w
            where w.section <> 'omitted') d
            on d.is_line = (r.line_no > 0) and d.place = case when r.line_no = 0 then r.seq::text else r.message_id end
        cross join lateral pycontext._fate(s, r, d.w, v_words, as_of is not null, v_has_line, v_marker) f
        union all
        -- what only the window has, beside the row it stands with
        select t.place, t.line_no, null, coalesce(nullif(pycontext._preview(pycontext._content_text(w.content), v_words), ''),
            '(empty)'), t.fate, t.cause, t.reason, w.tokens, null, w.role, w.section, null
        from unnest(v_window) w
        cross join lateral (
            select v.* from (values
                ('system', case when v_is_all then v_low - 1 end, 0, 'system', null, 'the system prompt'),
                ('omitted', w.seq, 20000, 'marker', 'budget', 'for what is left out')) v (section, place, line_no, fate, cause, reason)
            where v.section = w.section
            union all
            select w.section, (
                select p.seq from unnest(v_window) p
                where p.ordinal < w.ordinal and p.seq is not null and p.section = w.section
                order by p.ordinal desc limit 1), 10000 + w.ordinal, 'stand-in', null, 'no result has come'
            where w.seq is null and w.role = 'tool') t
        where t.place between v_low - 1 and v_top
            and (v_words is null or (
                select bool_and(strpos(pycontext._folded(pycontext._content_text(w.content)), x) > 0) from unnest(v_words) x))
        union all
        select v_low - 1, -1, null, 'older rows', 'not shown', null, format('before_seq => %s', v_low), 0, null, null, null, null
        where not v_is_all) q
    order by q.place, q.line_no;
end
$$;
comment on function pycontext.explain_window(text, integer, text, text, bigint, integer) is
    'Why each row is in the window of that budget and time (as_of: a message_id; null = now), or is not: its fate, by which '
    'line, pass or act, and what it takes; oldest first, lines included. Made of the window''s own rows: tokens of all of it are the window''s. search: only '
    'rows with all these words, in any case. The newest max_rows before before_seq (with search, of 100,000 looked at); '
    'a row "not shown" tells where to go on.';

-- Whether the window's line has the words of a row, and which of the lines that it was merged from, f on, dropped them.
create or replace function pycontext._words_fate(
    s pycontext._window_state, f pycontext.message, words text[], is_replay boolean)
returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with line as (
        select m.seq, m.at_act, (
            select bool_and(strpos(pycontext._folded(m.content #>> '{}'), x) > 0) from unnest(words) x) as has_words
        from (
            -- a line that came late, behind one that was there, told nothing on
            select t.*, max(t.seq) over (order by t.at_act rows between unbounded preceding and 1 preceding) as reached
            from pycontext.message t
            where t.chat_id = s.chat_id and t.line_no > 0 and t.origin = 'compaction' and t.seq between f.seq and s.line_seq
                and t.at_act between f.at_act and s.hi_act and (t.gone_act is null or is_replay and t.gone_act > s.hi_act)) m
        where m.reached is null or m.seq > m.reached
    )
    select case
        when (select l.has_words from line l order by l.at_act desc limit 1) then 'the summary has the words'
        when f.seq = s.line_seq then 'the summary lacks them'
        else format('lost in the line at #%s', (
            select l.seq from line l
            where l.at_act > coalesce((select max(k.at_act) from line k where k.has_words), -1)
            order by l.at_act limit 1)) end
$$;

-- What became of one row: w is its row in the window, if it is there.
create or replace function pycontext._fate(
    s pycontext._window_state, r pycontext._thread_row, w pycontext.window_row, words text[], is_replay boolean,
    has_line boolean, marker bigint, out fate text, out cause text, out reason text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    a pycontext.act;
    l pycontext.message;
    v_shown boolean := w.ordinal is not null;
    v_is_line boolean := r.line_no > 0;
begin
    if v_shown and v_is_line then
        fate := case when w.is_shortened then 'shortened' else 'summary' end;
        cause := case when w.is_shortened then 'budget' end;
        reason := case when r.origin = 'reset' then 'the user started over'
            else format('stands for #%s to #%s', s.line_covers_from, s.line_seq) end;
        return;
    elsif v_shown and w.is_shortened and s.mode <> 'shorten' and w.section <> 'head' then
        fate := 'pruned';
        cause := 'budget';
        if r.unit_seq < s.prune_unit then
            cause := 'pass ' || (
                select min(p.pass_no) from pycontext.pass p
                where p.chat_id = s.chat_id and p.outcome = 'pruned' and p.act_no <= s.hi_act
                    and p.to_seq >= r.unit_seq and p.pass_no > coalesce((
                        select max(q.pass_no) from pycontext.pass q
                        where q.chat_id = s.chat_id and q.summary_id = s.line_id), 0));
            cause := coalesce(cause, 'act ' || (
                select max(t.act_no) from pycontext.act t
                where t.chat_id = s.chat_id and t.act_no <= s.hi_act and t.details ? 'prune_unit'));
        end if;
        reason := case when r.role = 'tool' then 'an old result' when r.stub_calls is not null then 'long arguments'
            else 'old images' end;
        return;
    elsif v_shown then
        fate := case when w.is_shortened then 'shortened' when w.section = 'tail' then 'kept' else w.section end;
        cause := case when w.is_shortened then 'budget' end;
        reason := case
            when w.is_shortened and w.section = 'head' then 'first turn, over its limit'
            when w.section = 'head' then 'the first turn'
            when w.section = 'request' and w.seq = s.turn_seq then 'the newest request'
            when w.section = 'request' and w.seq = s.request_seq then 'the line''s request'
            when w.section = 'request' then 'the request of what follows'
            when w.section = 'pinned' then 'pinned'
            when w.is_shortened then 'the tail does not fit'
            when r.role = 'tool' and r.unit_seq = r.seq then 'a result without its call'
            when s.mode in ('omit', 'shorten') then 'among the newest'
            when s.mode = 'prune' and r.unit_seq < s.first_unit then 'nothing to prune'
            when s.line_seq is not null then 'after the line'
            else 'all of it fits' end;
        if w.section = 'pinned' then
            cause := 'act ' || (
                select max(i.at_act) from pycontext.pin i
                where i.chat_id = s.chat_id and i.unit_seq = r.unit_seq and i.at_act <= s.hi_act);
        end if;
        return;
    end if;

    -- not sent
    if r.gone_act is not null and not (is_replay and r.gone_act > s.hi_act) then
        select t.* into a from pycontext.act t where t.chat_id = s.chat_id and t.act_no = r.gone_act;
        fate := case when v_is_line then 'dropped line' else 'set aside' end;
        cause := 'act ' || r.gone_act;
        reason := case a.act when 'rewound' then format('rewound to #%s', a.details ->> 'to_seq')
            when 'dropped' then 'undone' when 'redacted' then 'told what was erased' else a.act end;
        return;
    end if;
    select t.* into l from pycontext.message t
    where t.chat_id = s.chat_id and t.line_no > 0 and t.origin = 'reset' and t.seq >= r.seq and t.seq <= s.hi_seq
        and t.at_act <= s.hi_act and (t.gone_act is null or is_replay and t.gone_act > s.hi_act)
    order by t.seq, t.line_no limit 1;
    if found and s.line_seq >= l.seq and r.message_id <> l.message_id then
        fate := 'set aside';
        cause := l.message_id;
        reason := format('started over at #%s', l.seq);
    elsif r.message_id = s.line_id or r.seq <= s.line_seq and not has_line then
        fate := 'left out';
        cause := 'budget';
        reason := 'no room for the summary';
    elsif r.unit_seq = any (s.pin_units) then
        fate := 'left out';
        cause := 'budget';
        reason := 'pinned, but no room';
    elsif r.unit_seq between s.head_from and s.head_to then
        fate := 'left out';
        cause := 'budget';
        reason := 'no room for the first turn';
    elsif v_is_line then
        -- the first line after it that could draw on it
        select t.* into l from pycontext.message t
        where t.chat_id = s.chat_id and t.line_no > 0 and t.origin = 'compaction' and t.seq > r.seq and t.seq <= s.line_seq
            and t.at_act <= s.hi_act and (t.gone_act is null or is_replay and t.gone_act > s.hi_act)
        order by t.at_act limit 1;
        fate := case when l.at_act > r.at_act then 'merged' else 'not used' end;
        cause := coalesce(l.message_id, s.line_id);
        reason := case when l.at_act > r.at_act then 'a later line tells it on' else 'a later line was there' end;
    elsif r.superseded_seq <= s.hi_seq and r.seq > coalesce(marker, s.line_seq, r.seq - 1) then
        fate := 'replaced';
        cause := '#' || r.superseded_seq;
        reason := 'a later result came';
    elsif r.seq <= s.line_seq then
        select t.* into l from pycontext.message t
        where t.chat_id = s.chat_id and t.line_no > 0 and t.origin = 'compaction' and t.seq >= r.seq and t.seq <= s.line_seq
            and t.at_act <= s.hi_act and (t.gone_act is null or is_replay and t.gone_act > s.hi_act)
        order by t.at_act limit 1;
        fate := 'summarized';
        cause := s.line_id;
        if words is null then
            reason := case when l.message_id = s.line_id then format('before the line at #%s', l.seq)
                else format('merged from the line at #%s', l.seq) end;
        else
            reason := pycontext._words_fate(s, l, words, is_replay);
        end if;
    else
        fate := 'left out';
        cause := 'budget';
        reason := case when r.seq <= marker then 'older, behind the marker' else 'not even a marker fits' end;
    end if;
end
$$;
