-- Rows of a chat that live in a relation of the product, in the shape of our own. Only this function and
-- _thread_rows know where messages live. max_rows bounds what is read, from the end that newest_first says.
create or replace function pycontext._source_rows(
    chat_id text, source text, from_seq bigint, to_seq bigint,
    max_rows integer, newest_first boolean, users_only boolean, message_id text, section_no integer)
returns setof pycontext._thread_row
language plpgsql stable
set search_path = ''
as $$
declare
    v_relation text;
    v_id_type text;
    v_message_type text;
    v_optional text;
    v_has_metadata boolean;
    v_encoding text;
    v_images integer;
begin
    select s.relation, p.encoding, p.image_tokens into v_relation, v_encoding, v_images
    from pycontext.source s
    left join pycontext.chat c on c.chat_id = _source_rows.chat_id
    join pycontext.profile p on p.profile = coalesce(c.profile, 'default')
    where s.source = _source_rows.source;
    select max(a.atttypid::regtype::text) filter (where a.attname = 'chat_id'),
        max(a.atttypid::regtype::text) filter (where a.attname = 'message_id'), bool_or(a.attname = 'metadata')
    into v_id_type, v_message_type, v_has_metadata
    from pg_catalog.pg_attribute a where a.attrelid = v_relation::regclass and a.attnum > 0;
    select string_agg(case when exists (
            select from pg_catalog.pg_attribute a
            where a.attrelid = v_relation::regclass and a.attname = o.column_name and a.attnum > 0)
        then format('to_jsonb(x.%I)%s as %I', o.column_name, o.tail, o.column_name)
        else format('null::%s as %I', o.type, o.column_name) end, ', ') into v_optional
    from (values ('tool_calls', '', 'jsonb'), ('tool_call_id', ' #>> ''{}''', 'text'), ('name', ' #>> ''{}''', 'text'),
        ('metadata', '', 'jsonb')) o (column_name, tail, type);
    return query execute format($q$
        with raw as materialized (
            select x.seq::bigint as seq, x.message_id::text as message_id, x.role::text as role,
                to_jsonb(x.content) as content, x.created_at::timestamptz as created_at, %1$s
            from %2$s x
            where x.chat_id = $1::%3$s and x.seq between $2 and $3 %4$s %5$s
            order by x.seq %6$s limit $4
        ), shaped as (
            select r.*, coalesce(r.metadata ->> 'injected', '') <> 'true' and r.role = 'user' as is_user,
                coalesce(u.seq, r.seq) as unit_seq,
                pycontext._has_fence(pycontext._content_text(r.content)) is true as has_fence,
                case when jsonb_typeof(r.tool_calls) = 'array' then jsonb_array_length(r.tool_calls) else 0 end as calls
            from raw r
            left join lateral (
                select max(a.seq) as seq from raw a
                where r.role = 'tool' and a.role = 'assistant' and a.seq < r.seq
                    and a.tool_calls @> jsonb_build_array(jsonb_build_object('id', r.tool_call_id))) u on true
        ), rendered as (
            select s.*, s.role = 'tool' and s.unit_seq = s.seq as is_orphan,
                not (s.has_fence or pycontext._is_blank(s.content) or (s.role = 'tool' and s.unit_seq = s.seq)) as is_plain
            from shaped s
        ), counted as (
            select d.*, coalesce(t.tokens, k.overhead + pycontext._estimate_pieces(k.texts)) as tokens,
                case when t.tokens is not null then $5 end as encoding, k.images
            from rendered d
            cross join lateral pycontext._count_pieces(
                case when d.is_plain then d.content
                    else pycontext._rendered(d.content, d.has_fence, d.is_orphan, d.tool_call_id, d.calls > 0) end,
                case when d.calls > 0 then d.tool_calls end, case when d.is_orphan then 'user' else d.role end,
                d.name, $6) k
            left join pycontext.token_count t
                on t.chat_id = $7 and t.seq = d.seq and t.line_no = 0 and t.encoding = $5
        )
        select $8, $7, null::bigint, c.seq, 0::smallint, 'message', c.role, c.unit_seq, c.tokens, c.tokens, c.tokens, 0,
            -(sum(c.tokens) over w - c.tokens)::bigint, 0::bigint, c.images::smallint, c.calls::smallint,
            c.is_user, c.is_plain, c.has_fence, null::bigint,
            case when c.role = 'tool' and c.unit_seq <> c.seq then
                lead(c.seq) over (partition by c.role, c.unit_seq, c.tool_call_id order by c.seq) end,
            0::bigint, c.encoding, c.message_id, c.tool_call_id, c.name, c.created_at, null::text, null::text, null::jsonb,
            c.content, case when c.calls > 0 then c.tool_calls end, c.metadata, null::jsonb
        from counted c
        window w as (order by c.seq desc)
        $q$, v_optional, v_relation, v_id_type,
        case when users_only then 'and x.role = ''user''' || case when v_has_metadata
            then ' and coalesce(to_jsonb(x.metadata) ->> ''injected'', '''') <> ''true''' else '' end end,
        case when message_id is not null then format('and x.message_id = %L::%s', message_id, v_message_type) end,
        case when newest_first then 'desc' else 'asc' end)
    using chat_id, from_seq, to_seq, max_rows, v_encoding, v_images, chat_id, section_no;
exception when invalid_text_representation or numeric_value_out_of_range then
    -- an id that is no value of the relation's type names no chat and no message there
    return;
end
$$;

-- The one reader of a thread. Rows (not lines) as they stood at act as_of_act (null: now). Ways in: ranges of whole
-- units, section_no telling which; newest_first, max_rows by seq; the first unit that starts at or after the running
-- total min_start; one message_id. Every way is one index scan that stops where it may.
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
            users_only, _thread_rows.message_id, g.n::integer) s
        where min_start is null or s.seq = s.unit_seq and s.running_total - s.frozen_tokens >= min_start;
    elsif message_id is not null then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.message_id = _thread_rows.message_id and r.line_no = 0
            and r.gone_act is null;
    elsif as_of_act is not null then
        -- a range of one seq is that row, whatever its unit
        for i in 1 .. cardinality(from_seq) loop
            return query
            select i, r.* from pycontext._stored_row r
            where r.chat_id = _thread_rows.chat_id and r.seq between from_seq[i] and to_seq[i] and r.line_no = 0
                and (r.unit_seq >= from_seq[i] or from_seq[i] = to_seq[i]) and r.at_act <= as_of_act
                and (r.gone_act is null or r.gone_act > as_of_act)
                and (min_start is null or r.seq = r.unit_seq and r.running_total - r.frozen_tokens >= min_start)
            order by case when newest_first then -r.seq else r.seq end
            limit case when min_start is not null then 1 else max_rows end;
        end loop;
    elsif min_start is not null then
        return query
        select 1, r.* from pycontext._stored_row r
        where r.chat_id = _thread_rows.chat_id and r.unit_seq between from_seq[1] and to_seq[1] and r.gone_act is null
            and r.line_no = 0 and r.seq = r.unit_seq and r.running_total - r.frozen_tokens >= min_start
        order by r.unit_seq, r.seq, r.line_no
        limit 1;
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
        where r.unit_seq = _is_superseded.unit_seq and r.seq > _is_superseded.seq and r.role = 'tool'
            and r.tool_call_id = _is_superseded.tool_call_id)
$$;
