-- A row as a product's relation gives it.
create or replace view pycontext._source_row as
select
    null::bigint as seq, null::text as message_id, null::text as role, null::jsonb as content, null::jsonb as tool_calls,
    null::text as tool_call_id, null::text as name, null::jsonb as metadata, null::timestamptz as created_at,
    null::bigint as body_hash
where false;

comment on view pycontext._source_row is 'Private. A row as a product''s relation gives it.';

-- The statement that reads rows of a product's relation, in order of seq. $1 chat, $2 and $3 seq from and to, $4 at
-- most so many rows, $5 message id, $6 and $7 the times of $2 and $3. Names come from the catalog, values are arguments.
create or replace function pycontext._source_query(
    f pycontext.source, newest_first boolean, users_only boolean, has_id boolean, calls_only boolean, results_only boolean)
returns text
language sql stable
as $$
    select format(
        $q$select array_agg(row(r.*)::pycontext._source_row order by r.seq) from (
            select x.seq::bigint as seq, x.message_id::text as message_id, x.role::text as role, to_jsonb(x.content) as content,
                %1$s as tool_calls, %2$s as tool_call_id, %3$s as name, %4$s as metadata, x.created_at::timestamptz as created_at,
                hashtextextended(coalesce(x.content::text, ''), hashtextextended(
                    jsonb_build_array(x.role::text, %1$s, %2$s, %3$s)::text, 0)) as body_hash
            from %5$s x
            where x.chat_id = $1::%6$s and %7$s %8$s
            order by %9$s limit $4) r
        where r.role in ('user', 'assistant', 'tool', 'system', 'developer') %10$s$q$,
        case when 'tool_calls' = any(f.has_columns) then 'to_jsonb(x.tool_calls)' else 'null::jsonb' end,
        case when 'tool_call_id' = any(f.has_columns) then 'x.tool_call_id::text' else 'null::text' end,
        case when 'name' = any(f.has_columns) then 'x.name::text' else 'null::text' end,
        case when 'metadata' = any(f.has_columns) then 'to_jsonb(x.metadata)' else 'null::jsonb' end,
        f.relation::pg_catalog.regclass::text,
        f.chat_type,
        case when f.order_type is null then 'x.seq between $2 and $3'
            else format('x.order_at between %1$s and %2$s and (x.order_at > %1$s or x.seq >= $2) '
                'and (x.order_at < %2$s or x.seq <= $3)', o.lo, o.hi) end,
        case when has_id then format('and x.message_id = $5::%s', f.message_type) else '' end
            || case when users_only then ' and x.role = ''user''' || case when 'metadata' = any(f.has_columns)
                then ' and coalesce(to_jsonb(x.metadata) ->> ''injected'', '''') <> ''true''' else '' end else '' end,
        case when f.order_type is null then '' else 'x.order_at' || o.way || ', ' end || 'x.seq' || o.way,
        case when calls_only then 'and r.role = ''assistant'' and jsonb_typeof(r.tool_calls) = ''array'''
            when results_only then 'and r.role = ''tool''' end)
    from (
        select case when newest_first then ' desc' else '' end as way,
            case when f.order_type like '%with time zone' then '($6 at time zone ''UTC'')' else '$6' end as lo,
            case when f.order_type like '%with time zone' then '($7 at time zone ''UTC'')' else '$7' end as hi) o
$$;

comment on function pycontext._source_query(pycontext.source, boolean, boolean, boolean, boolean, boolean) is
    'Private. The statement that reads rows of a product''s relation.';

-- Where order_at stands for a seq that is made of it (UTC): 2000 places a microsecond since the year 2000.
create or replace function pycontext._time_at(seq bigint)
returns timestamp
language sql immutable parallel safe
as $$
    select timestamp '2000-01-01 00:00:00' + floor(seq::numeric / 2000)::double precision * interval '1 microsecond'
$$;

comment on function pycontext._time_at(bigint) is 'Private. The time that a seq made of a time stands for.';

-- What a row of a product costs and how it is shown, found by looking at all of it.
create or replace function pycontext._row_facts(
    content jsonb, tool_calls jsonb, role text, name text, tool_call_id text, is_orphan boolean, image_tokens integer,
    out tokens integer, out reasoning_tokens integer, out images smallint, out has_fence boolean, out is_plain boolean)
language plpgsql immutable parallel safe
set search_path = ''
as $$
declare
    v_body text := pycontext._content_text(content);
    k record;
begin
    has_fence := coalesce(pycontext._has_fence(v_body), false);
    is_plain := not (has_fence or is_orphan
        or case when jsonb_typeof(content) = 'string' then v_body !~ '\S'
            else pycontext._is_blank(content) or jsonb_typeof(content) = 'array' and exists (
                select from jsonb_array_elements(content) e
                where pycontext._part_kind(e.value) = 'text' and pycontext._part_text(e.value) !~ '\S') end
            and not (content is null and tool_calls is not null));
    select * into k from pycontext._count_pieces(case when is_plain then content
        else pycontext._rendered(content, has_fence, is_orphan, tool_call_id, tool_calls is not null) end,
        tool_calls, case when is_orphan then 'user' else role end, name, image_tokens);
    images := least(k.images, 32767);
    reasoning_tokens := pycontext._estimate_pieces(k.reasoning);
    tokens := k.overhead + pycontext._estimate_pieces(k.texts) + reasoning_tokens;
end
$$;

comment on function pycontext._row_facts(jsonb, jsonb, text, text, text, boolean, integer) is
    'Private. Tokens and form of a product''s row.';

-- Rows of a chat that live in a relation of the product, in the shape of our own. Only this function and _thread_rows
-- know where messages live. One dynamic statement reads what lies between the places; units, counts and totals are
-- made here. A call and a result that are more than 512 rows apart do not find each other.
create or replace function pycontext._source_rows(
    chat_id text, source text, from_seq bigint, to_seq bigint, max_rows integer, newest_first boolean,
    users_only boolean, message_id text, section_no integer, is_narrow boolean default false)
returns setof pycontext._thread_row
language plpgsql stable
set search_path = ''
as $$
declare
    f pycontext.source;
    p record;
    v_rows pycontext._source_row[];
    v_more pycontext._source_row[];
    v_ids text[];
    v_lines bigint[];
    v_edge bigint;
    v_first bigint;
    -- ranges are ranges of units, but for those read by seq from one end
    v_by_unit boolean := not newest_first and message_id is null and not users_only and from_seq < to_seq;
begin
    select s.* into f from pycontext.source s where s.source = _source_rows.source;
    if f.chat_type is null then
        f := pycontext._with_columns(f);
    end if;
    begin
        execute pycontext._source_query(f, newest_first, users_only, message_id is not null, false, false)
        into v_rows
        using chat_id, from_seq, to_seq, max_rows, message_id, pycontext._time_at(from_seq), pycontext._time_at(to_seq);
    exception when invalid_text_representation or numeric_value_out_of_range or invalid_datetime_format then
        return;  -- an id that is no value of the relation's type names no chat and no message there
    end;
    if v_rows is null then
        return;
    end if;
    v_first := v_rows[1].seq;
    select coalesce(r.encoding, d.encoding) as encoding, coalesce(r.image_tokens, d.image_tokens) as image_tokens into p
    from pycontext.profile d
    left join pycontext.chat c on c.chat_id = _source_rows.chat_id
    left join pycontext.profile r on r.profile = c.profile
    where d.profile = 'default';

    if not is_narrow or max_rows is distinct from 1 then
        -- calls before the range whose results are in it
        select array_agg(distinct r.tool_call_id), min(r.seq) into v_ids, v_edge
        from unnest(v_rows) r
        where r.role = 'tool' and r.tool_call_id is not null and not exists (
            select from unnest(v_rows) a
            where a.role = 'assistant' and a.seq < r.seq
                and a.tool_calls @> jsonb_build_array(jsonb_build_object('id', r.tool_call_id)));
    end if;
    -- a result does not find its call across a line
    select array_agg(m.seq) into v_lines
    from pycontext.message m where m.chat_id = _source_rows.chat_id and m.line_no > 0 and m.gone_act is null;
    if v_ids is not null then
        if v_edge > v_rows[1].seq then
            v_edge := v_rows[1].seq;
        end if;
        if v_lines is null or v_edge - 1 <> all(v_lines) then
            execute pycontext._source_query(f, true, false, false, true, false)
            into v_more
            using chat_id, pycontext._origin(source), v_edge - 1, 512, null::text, pycontext._time_at(pycontext._origin(source)),
                pycontext._time_at(v_edge - 1);
            v_rows := v_more || v_rows;
        end if;
    end if;
    if v_by_unit then
        -- results after the range whose calls are in it
        v_edge := case when cardinality(v_rows) >= max_rows then v_rows[cardinality(v_rows)].seq else to_seq end;
        if v_edge < 4611686018427387904 and exists (
            select from unnest(v_rows) r
            cross join lateral jsonb_array_elements(case when jsonb_typeof(r.tool_calls) = 'array' then r.tool_calls end) e
            where r.role = 'assistant' and r.seq >= from_seq and not exists (
                select from unnest(v_rows) t
                where t.role = 'tool' and t.tool_call_id = e.value ->> 'id' and t.seq > r.seq
                    and coalesce(t.metadata ->> 'pending', '') <> 'true')) then
            execute pycontext._source_query(f, false, false, false, false, true)
            into v_more
            using chat_id, v_edge + 1, 4611686018427387904, 512, null::text, pycontext._time_at(v_edge + 1),
                pycontext._time_at(4611686018427387904);
            v_rows := v_rows || v_more;
        end if;
    end if;
    return query
    with raw as materialized (
        select r.*, case when r.role = 'assistant' and jsonb_typeof(r.tool_calls) = 'array'
            then jsonb_array_length(r.tool_calls) else 0 end as calls
        from unnest(v_rows) r
    ), event as (
        select r.seq, e.value ->> 'id' as call_id, r.seq as call_seq, false as is_final
        from raw r cross join lateral jsonb_array_elements(r.tool_calls) e
        where r.calls > 0
        union all
        select r.seq, r.tool_call_id, null, coalesce(r.metadata ->> 'pending', '') <> 'true' from raw r where r.role = 'tool'
    ), found as (
        select e.seq, e.call_id, e.is_final, e.call_seq is null as is_result,
            max(e.call_seq) over (partition by e.call_id order by e.seq) as unit_seq
        from event e
    ), unit as (
        -- the first final result of a call closes it; what comes after that answers nothing
        select d.seq, d.unit_seq, case when not d.is_final then lead(d.seq) over w end as superseded_seq,
            coalesce(bool_or(d.is_final) over (w rows between unbounded preceding and 1 preceding), false) as is_closed
        from found d
        where d.is_result and d.unit_seq is not null
        window w as (partition by d.call_id, d.unit_seq order by d.seq)
    ), shaped as (
        select r.*, coalesce(u.unit_seq, r.seq) as unit_seq, u.superseded_seq, r.role = 'tool' and u.unit_seq is null as is_orphan
        from raw r
        left join unit u on u.seq = r.seq and not u.is_closed and (v_lines is null or not exists (
            select from unnest(v_lines) l where l >= u.unit_seq and l < u.seq))
    ), counted as (
        select d.*, coalesce(t.tokens, k.tokens) as tokens, case when t.tokens is not null then p.encoding end as encoding,
            coalesce(t.reasoning_tokens, k.reasoning_tokens) as reasoning_tokens, coalesce(t.images, k.images) as images,
            coalesce(t.has_fence, k.has_fence) as has_fence, coalesce(t.is_plain, k.is_plain) as is_plain
        from shaped d
        left join pycontext.token_count t
            on t.chat_id = _source_rows.chat_id and t.seq = d.seq and t.line_no = 0 and t.encoding = p.encoding
            and t.body_hash = d.body_hash + d.is_orphan::integer
        -- offset 0: a row that is counted is not looked at
        left join lateral (
            select q.* from pycontext._row_facts(d.content, case when d.calls > 0 then d.tool_calls end, d.role, d.name,
                d.tool_call_id, d.is_orphan, p.image_tokens) q
            where t.tokens is null
            offset 0) k on true
        where case when v_by_unit then d.unit_seq between from_seq and to_seq else d.seq >= v_first end
    )
    select section_no, _source_rows.chat_id, null::bigint, c.seq, 0::smallint, 'message'::text, c.role, c.unit_seq, c.tokens,
        c.tokens, c.tokens, c.reasoning_tokens, -(sum(c.tokens) over (order by c.seq desc) - c.tokens)::bigint, 0::bigint,
        c.images, c.calls::smallint, c.role = 'user' and coalesce(c.metadata ->> 'injected', '') <> 'true', c.is_plain,
        c.has_fence, null::bigint, c.superseded_seq, 0::bigint, c.encoding, c.message_id, c.tool_call_id, c.name,
        c.created_at, null::text, null::text, null::jsonb, case when not is_narrow then c.content end,
        case when c.calls > 0 and not is_narrow then case when exists (
                select from jsonb_array_elements(c.tool_calls) e
                where jsonb_typeof(e.value #> '{function,arguments}') is distinct from 'string')
            then pycontext._clean_calls(c.tool_calls) else c.tool_calls end end,
        case when not is_narrow then c.metadata end, null::jsonb
    from counted c
    order by c.seq;
end
$$;

-- The one reader of a thread. Rows (not lines) as they stood at act as_of_act (null: now). Ways in: ranges of whole
-- units, section_no telling which; newest_first, max_rows by seq; with min_start starts of units, among them the range's
-- first and the first at or after that running total; one message_id. Every way is an index scan that stops where it may.
-- (seq <= unit_seq is what starts a unit: of an equality the planner thinks that it is rare, and sorts.)
create or replace function pycontext._thread_rows(
    chat_id text, source text, from_seq bigint[], to_seq bigint[], as_of_act bigint default null,
    max_rows integer default null, newest_first boolean default false, min_start bigint default null,
    message_id text default null, users_only boolean default false)
returns setof pycontext._thread_row
language plpgsql stable
set search_path = ''
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
begin
    if source is not null then
        return query
        select s.*
        from unnest(from_seq, to_seq) with ordinality g (lo, hi, n)
        cross join lateral pycontext._source_rows(_thread_rows.chat_id, source, g.lo, g.hi, max_rows, newest_first,
            users_only, _thread_rows.message_id, g.n::integer, min_start is not null) s
        where min_start is null or s.seq = s.unit_seq;
    elsif message_id is not null then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.message_id = _thread_rows.message_id and r.line_no = 0
            and r.gone_act is null;
    elsif as_of_act is not null and newest_first then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.seq between from_seq[1] and to_seq[1] and r.line_no = 0
            and r.at_act <= as_of_act and (r.gone_act is null or r.gone_act > as_of_act)
        order by r.seq desc, r.line_no desc
        limit max_rows;
    elsif as_of_act is not null and min_start is not null then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.seq between from_seq[1] and to_seq[1] and r.line_no = 0
            and r.at_act <= as_of_act and (r.gone_act is null or r.gone_act > as_of_act) and r.seq = r.unit_seq
        order by r.seq, r.line_no
        limit max_rows;
    elsif as_of_act is not null then
        for i in 1 .. cardinality(from_seq) loop
            return query
            select i, r.* from pycontext._stored_row r
            where r.chat_id = _thread_rows.chat_id and r.seq between from_seq[i] and to_seq[i] and r.line_no = 0
                and r.unit_seq >= from_seq[i] and r.at_act <= as_of_act
                and (r.gone_act is null or r.gone_act > as_of_act)
            union all
            -- results that came after the range, live and set aside since: found by unit, not by seq
            select i, r.* from pycontext._stored_row r
            where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[i] and to_seq[i]
                and (r.seq > to_seq[i]) is true
                and r.line_no = 0 and r.gone_act is null and r.at_act <= as_of_act
            union all
            select i, r.* from pycontext._stored_row r
            where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[i] and to_seq[i]
                and (r.seq > to_seq[i]) is true
                and r.line_no = 0 and r.gone_act is not null and r.gone_act > as_of_act and r.at_act <= as_of_act;
        end loop;
    elsif min_start is not null then
        return query
        (select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[1] and to_seq[1] and r.gone_act is null
            and r.line_no = 0 and r.seq <= r.unit_seq
        order by r.unit_seq, r.seq, r.line_no
        limit 1)
        union all
        (select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[1] and to_seq[1] and r.gone_act is null
            and r.line_no = 0 and r.seq <= r.unit_seq and r.running_total - r.frozen_tokens >= min_start
        order by r.unit_seq, r.seq, r.line_no
        limit 1);
    elsif newest_first then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.seq between from_seq[1] and to_seq[1] and r.gone_act is null
            and r.line_no = 0
        order by r.seq desc, r.line_no desc
        limit max_rows;
    else
        for i in 1 .. cardinality(from_seq) loop
            return query
            select i, r.* from pycontext._stored_row r
            where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[i] and to_seq[i]
                and r.gone_act is null and r.line_no = 0
            limit max_rows;
        end loop;
    end if;
end
$$;

-- Whether a better result of the same call is in sight at that act, up to hi_seq.
create or replace function pycontext._is_superseded(
    chat_id text, seq bigint, unit_seq bigint, tool_call_id text, act bigint, hi_seq bigint)
returns boolean
language sql stable
as $$
    select exists (
        select from pycontext._thread_rows(_is_superseded.chat_id, null, array[_is_superseded.unit_seq], array[hi_seq],
            coalesce(act, 9223372036854775806)) r
        where r.unit_seq = _is_superseded.unit_seq and r.seq > _is_superseded.seq and r.seq <= hi_seq and r.role = 'tool'
            and r.tool_call_id = _is_superseded.tool_call_id)
$$;
