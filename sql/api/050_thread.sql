-- A row as a product's relation gives it.
create or replace view pycontext._source_row as
select
    null::bigint as seq, null::text as message_id, null::text as role, null::jsonb as content, null::jsonb as tool_calls,
    null::text as tool_call_id, null::text as name, null::jsonb as metadata, null::timestamptz as created_at,
    null::bigint as body_hash, null::integer as tokens, null::integer as reasoning_tokens, null::smallint as images,
    null::boolean as has_fence, null::boolean as is_plain, null::bigint as count_hash
where false;

comment on view pycontext._source_row is
    'Private. A row as a product''s relation gives it, with its count; an estimate has no count_hash.';

-- What one statement reads of a product's relation: the rows in order of seq, whether there are calls or results among
-- them, how many were looked at, the first one's seq, whether all are counted as they read now, and (kind cut) about how many tokens.
create or replace view pycontext._source_batch as
select
    null::pycontext._source_row[] as rows, null::boolean as has_calls, null::bigint as looked_at, null::bigint as first_seq,
    null::boolean as is_counted, null::bigint as tokens
where false;

comment on view pycontext._source_batch is 'Private. What one statement reads of a product''s relation.';

-- Where a product's relation holds rows of one chat: $1 chat, $2 and $3 seq from and to, $6 and $7 the times of these.
-- The chat is no constant to the planner, and rows are ordered by it first: else it may walk an index of seq alone, over
-- the rows of every chat, since it thinks that few are looked at.
create or replace function pycontext._source_range(
    f pycontext.source, from_seq text default '$2', from_at text default '$6')
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_lo text := case when f.order_type like '%with time zone' then format('(%s at time zone ''UTC'')', from_at) else from_at end;
    v_hi text := case when f.order_type like '%with time zone' then '($7 at time zone ''UTC'')' else '$7' end;
begin
    return ' from ' || f.relation::pg_catalog.regclass::text || ' x where x.chat_id = any (array[$1::' || f.chat_type || '])'
        || case when f.order_type is null then ' and x.seq between ' || from_seq || ' and $3'
            else ' and x.order_at between ' || v_lo || ' and ' || v_hi || ' and (x.order_at > ' || v_lo || ' or x.seq >= '
                || from_seq || ') and (x.order_at < ' || v_hi || ' or x.seq <= $3)' end;
end
$$;

comment on function pycontext._source_range(pycontext.source, text, text) is
    'Private. The from and where by which rows of a product''s relation are read.';

-- A product's column as jsonb. A json column may hold what jsonb refuses: NUL and lone surrogates become U+FFFD.
create or replace function pycontext._jsonb(value anyelement)
returns jsonb
language sql stable parallel safe
as $$
    select to_jsonb(value)
$$;

create or replace function pycontext._jsonb(value json)
returns jsonb
language sql immutable parallel safe
as $$
    select case when value::text !~* '\\u(0000|d[89a-f])' then value::jsonb
        -- \u005c for an escaped \: then every \ begins an escape
        else regexp_replace(regexp_replace(replace(value::text, '\\', '\u005c'),
            '\\u(0000|d[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2}))', '\ufffd', 'gi'),
            '(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2}', '\ufffd', 'gi')::jsonb end
$$;

comment on function pycontext._jsonb(anyelement) is 'Private. A column of a product as jsonb.';
comment on function pycontext._jsonb(json) is 'Private. A json column of a product as jsonb, without what jsonb refuses.';

create or replace function pycontext._have_own_ids(tool_calls jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select count(distinct e.value -> 'id') = count(*) from jsonb_array_elements(tool_calls) e
$$;

comment on function pycontext._have_own_ids(jsonb) is 'Private. Whether no two calls of a row share an id.';

-- Whether calls of a product's row are calls in OpenAI's form, each with an id of its own. Strict: what an element lacks
-- makes the condition unknown, not false. An expression of its caller's: so it has no settings.
create or replace function pycontext._are_calls(tool_calls jsonb)
returns boolean
language sql immutable parallel safe
as $$
    select jsonb_typeof(tool_calls) = 'array' and not tool_calls @? 'strict $[*] ? (
            !(@.id like_regex "." && (@.function.name like_regex "." || @.custom.name like_regex "."))
            || (@.id like_regex "." && (@.function.name like_regex "." || @.custom.name like_regex ".")) is unknown)'
        and (jsonb_array_length(tool_calls) < 2 or pycontext._have_own_ids(tool_calls))
$$;

comment on function pycontext._are_calls(jsonb) is
    'Private. Whether calls of a product''s row are calls in OpenAI''s form, each with an id of its own.';

-- What is no call in tool_calls, or the second of an id, is told as text after the content: no provider takes it as a call, and
-- the model should know of it. null: there is none.
create or replace function pycontext._split_calls(tool_calls jsonb, out calls jsonb, out told text)
language sql immutable parallel safe
as $$
    select jsonb_agg(d.call order by d.n) filter (where d.is_call and d.nth = 1),
        string_agg(format('[tool call %s]', d.call), E'\n' order by d.n) filter (where not (d.is_call and d.nth = 1))
    from (
        select e.value as call, e.ordinality as n, q.is_call,
            row_number() over (partition by q.is_call, e.value -> 'id' order by e.ordinality) as nth
        from jsonb_array_elements(case jsonb_typeof(tool_calls) when 'array' then tool_calls
            when 'null' then '[]' else jsonb_build_array(tool_calls) end) with ordinality e
        cross join lateral (select pycontext._are_calls(jsonb_build_array(e.value)) as is_call) q) d
$$;

comment on function pycontext._split_calls(jsonb) is
    'Private. Which of a product''s calls can be sent as calls, and the others as text.';

create or replace function pycontext._with_told_calls(content jsonb, tool_calls jsonb)
returns jsonb
language sql immutable parallel safe
as $$
    select case when t.told is null then content
        when jsonb_typeof(content) = 'array' then content || jsonb_build_object('type', 'text', 'text', t.told)
        when jsonb_typeof(content) = 'string' and content <> '""' then to_jsonb((content #>> '{}') || E'\n' || t.told)
        else to_jsonb(t.told) end
    from pycontext._split_calls(tool_calls) t
$$;

comment on function pycontext._with_told_calls(jsonb, jsonb) is
    'Private. A content of a product with what is no call in its tool_calls.';

-- A time of a product as every client can read it: years 1 to 9999, no infinity.
create or replace function pycontext._told_time(moment timestamptz)
returns timestamptz
language sql immutable parallel safe
as $$
    select case when moment < '0001-01-02Z' then '0001-01-02Z' when moment > '9999-12-30Z' then '9999-12-30Z' else moment end
$$;

comment on function pycontext._told_time(timestamptz) is 'Private. A time of a product as every client can read it.';

-- The statement that reads a _source_batch of a product's relation. $1 chat, $2 and $3 seq from and to, $4 at most so many
-- rows, $5 message id, $6 and $7 the times of $2 and $3, $8 the encoding of counts. Names come from the catalog, values
-- are arguments. kind: newest or oldest rows, newest or oldest user message, the row of an id, calls (the newest), results
-- (the oldest, and calls), each with its count; newest or oldest places, without content; all rows, without counts; cut: no
-- rows, but where the first $4 rows end (first_seq is the place after them) and what they cost, by the size of a few at
-- eight places among them; edge: no rows, but a hash of the places of the newest $4 of them, as tokens.
create or replace function pycontext._source_query(f pycontext.source, kind text)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_calls text := case when 'tool_calls' = any(f.has_columns) then 'pycontext._jsonb(x.tool_calls)' else 'null::jsonb' end;
    v_call_id text := case when 'tool_call_id' = any(f.has_columns) then 'x.tool_call_id::text' else 'null::text' end;
    v_name text := case when 'name' = any(f.has_columns) then 'x.name::text' else 'null::text' end;
    v_metadata text := case when 'metadata' = any(f.has_columns) then 'pycontext._jsonb(x.metadata)' else 'null::jsonb' end;
    v_is_ours text := 'r.role in (''user'', ''assistant'', ''tool'', ''system'', ''developer'')';
    v_is_narrow boolean := kind like '% places';
    v_is_counted boolean := kind not like '% places' and kind <> 'all';
    v_way text := case when kind like 'newest%' or kind in ('id', 'calls', 'edge') then ' desc' else '' end;
    v_order text := ' order by x.chat_id' || v_way || ', ' || case when f.order_type is null then '' else 'x.order_at' || v_way || ', ' end || 'x.seq' || v_way;
begin
    if kind = 'cut' then
        return 'with e as materialized (select (select x.seq::bigint' || pycontext._source_range(f) || v_order
            || ' limit 1) as lo, (select x.seq::bigint' || pycontext._source_range(f) || v_order || ' offset $4 limit 1) as hi)'
            || ' select null::pycontext._source_row[] as rows, null::boolean as has_calls, $4::bigint as looked_at,'
            || ' e.hi as first_seq, null::boolean as is_counted, (select ($4 * avg(4 + z.size / 4))::bigint'
            || ' from generate_series(0, 7) g (n) cross join lateral (select e.lo + g.n * ((e.hi - e.lo) / 8) as seq) p'
            || ' cross join lateral (select octet_length(x.content::text) as size'
            || pycontext._source_range(f, 'p.seq', 'pycontext._time_at(p.seq)') || v_order || ' limit 8) z) as tokens from e';
    end if;
    if kind = 'edge' then
        return 'select null::pycontext._source_row[] as rows, null::boolean as has_calls, count(*) as looked_at,'
            || ' null::bigint as first_seq, null::boolean as is_counted, bit_xor(hashint8extended(r.seq, 0)) filter (where '
            || v_is_ours || ') as tokens from ('
            || 'select x.seq::bigint as seq, x.role::text as role' || pycontext._source_range(f) || v_order || ' limit $4) r';
    end if;
    return 'select array_agg(row(r.*, '
        || case when v_is_counted then 'c.*'
            else 'null::integer, null::integer, null::smallint, null::boolean, null::boolean, null::bigint' end
        || ')::pycontext._source_row order by r.seq)'
        || ' filter (where ' || v_is_ours
        || case kind when 'calls' then ' and r.role = ''assistant'' and jsonb_typeof(r.tool_calls) = ''array'''
            when 'results' then ' and (r.role = ''tool'' or r.role = ''assistant'' and jsonb_typeof(r.tool_calls) = ''array'')'
            else '' end
        || ') as rows, bool_or(r.role = ''tool'' or r.tool_calls is not null) as has_calls, count(*) as looked_at,'
        || ' min(r.seq) as first_seq, '
        || case when v_is_counted then 'coalesce(bool_and(c.count_hash = r.body_hash and c.tokens is not null), true)'
            else 'null::boolean' end || ' as is_counted, null::bigint as tokens from ('
        || case when 'tool_calls' = any(f.has_columns) then 'select q.seq, q.message_id, q.role, '
            || case when v_is_narrow then 'q.content' else 'case when q.role = ''assistant'' and not '
                || 'pycontext._are_calls(q.tool_calls) then pycontext._with_told_calls(q.content, q.tool_calls) else q.content end' end
            || ', case when q.tool_calls is null or pycontext._are_calls(q.tool_calls) then q.tool_calls else (pycontext._split_calls(q.tool_calls)).calls'
            || ' end, q.tool_call_id, q.name, q.metadata, q.created_at, q.body_hash from (' else '' end
        || 'select x.seq::bigint as seq, x.message_id::text as message_id, x.role::text as role, '
        || case when v_is_narrow then 'null::jsonb' else 'pycontext._jsonb(x.content)' end || ' as content, '
        || v_calls || ' as tool_calls, ' || v_call_id || ' as tool_call_id, ' || v_name || ' as name, ' || v_metadata
        || ' as metadata, pycontext._told_time(x.created_at::timestamptz) as created_at, '
        || case when v_is_narrow then 'null::bigint'
            else 'hashtextextended(coalesce(x.content::text, ''''), hashtextextended('
                || case when f.has_columns && array['tool_calls', 'tool_call_id', 'name']
                    then 'jsonb_build_array(x.role::text, ' || v_calls || ', ' || v_call_id || ', ' || v_name || ')::text'
                    else 'x.role::text' end || ', 0))' end
        || ' as body_hash' || pycontext._source_range(f)
        || case when kind = 'id' then ' and x.message_id = $5::' || f.message_type else '' end
        || case when kind like '% user' then ' and x.role = ''user''' else '' end
        || case when kind like '% user' and 'metadata' = any(f.has_columns)
            then ' and coalesce(pycontext._jsonb(x.metadata) ->> ''injected'', '''') <> ''true''' else '' end
        || v_order || ' limit $4) ' || case when 'tool_calls' = any(f.has_columns) then 'q) ' else '' end
        || 'r (seq, message_id, role, content, tool_calls, tool_call_id, name, metadata, created_at, body_hash)'
        -- limit 1: one look-up a row, never the counts of the whole chat
        || case when v_is_counted then ' left join lateral (select t.tokens, t.reasoning_tokens, t.images, t.has_fence,'
            || ' t.is_plain, t.body_hash as count_hash from pycontext.token_count t where t.chat_id = $1 and t.seq = r.seq'
            || ' and t.line_no = 0 and t.encoding = $8 limit 1) c on true' else '' end;
end
$$;

comment on function pycontext._source_query(pycontext.source, text) is
    'Private. The statement that reads rows of a product''s relation.';

-- Makes function _read_relation anew, which holds the statements of every registered source: so each is planned once in
-- a session, not at every read. Whoever may not replace it leaves it as it is: what it does not hold is planned at each
-- read. A branch holds for what was registered when it was made.
create or replace function pycontext._compile_sources()
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source;
    v_kind text;
    v_body text := '';
begin
    if exists (
        select from pg_catalog.pg_proc p
        where p.proname = '_read_relation' and p.pronamespace = 'pycontext'::regnamespace
            and not pg_has_role(current_user, p.proowner, 'usage')
        union all
        select where not has_schema_privilege('pycontext', 'create')) then
        return;
    end if;
    perform pg_advisory_xact_lock(7234015113000002);
    for f in
        select s.* from pycontext.source s where to_regclass(s.relation) is not null and s.chat_type is not null order by s.source
    loop
        v_body := v_body || format(E'if f.source = %L and f.relation = %L and f.chat_type = %L and f.message_type = %L\n'
            '    and f.order_type is not distinct from %L and f.has_columns = %L then\n',
            f.source, f.relation, f.chat_type, f.message_type, f.order_type, f.has_columns);
        foreach v_kind in array array['newest', 'oldest', 'newest user', 'oldest user', 'calls', 'results', 'newest places',
            'oldest places', 'cut', 'edge'] loop
            v_body := v_body || format(E'    if kind = %L then\n        select q.* into k from (%s) q;\n        return k;\n    end if;\n',
                v_kind, pycontext._source_query(f, v_kind));
        end loop;
        v_body := v_body || E'end if;\n';
    end loop;
    execute format($sql$
        create or replace function pycontext._read_relation(
            chat_id text, from_seq bigint, to_seq bigint, max_rows integer, message_id text, from_at timestamp, to_at timestamp,
            encoding text, f pycontext.source, kind text)
        returns pycontext._source_batch
        language plpgsql stable
        set search_path = pg_catalog, pg_temp
        set plan_cache_mode = force_generic_plan
        set max_parallel_workers_per_gather = 0
        set enable_seqscan = off
        set enable_sort = off
        set enable_bitmapscan = off
        set jit = off
        as %L $sql$, format(E'declare\n    k pycontext._source_batch;\nbegin\n%sreturn null;\nend', v_body));
    revoke execute on function pycontext._read_relation(
        text, bigint, bigint, integer, text, timestamp, timestamp, text, pycontext.source, text) from public;
    comment on function pycontext._read_relation(
        text, bigint, bigint, integer, text, timestamp, timestamp, text, pycontext.source, text) is
        'Private. Rows of a product''s relation, by the statements of the sources that are registered. Made by _compile_sources.';
end
$$;

comment on function pycontext._compile_sources() is
    'Private. Makes _read_relation, which holds the statements of every registered source.';

-- Where order_at stands for a seq that is made of it (UTC): 2000 places a microsecond since the year 2000.
create or replace function pycontext._time_at(seq bigint)
returns timestamp
language sql immutable parallel safe
as $$
    select timestamp '2000-01-01 00:00:00' + floor(seq::numeric / 2000)::double precision * interval '1 microsecond'
$$;

comment on function pycontext._time_at(bigint) is 'Private. The time that a seq made of a time stands for.';

-- Whether a text is a place in a thread: of an adopted chat in order of time it has 19 digits.
create or replace function pycontext._is_seq(given text)
returns boolean
language sql immutable parallel safe
as $$
    select coalesce(given, '') ~ '^-?[0-4]?[0-9]{1,18}$'
$$;

comment on function pycontext._is_seq(text) is 'Private. Whether a text is a place in a thread.';

-- What a row of a product costs and how it is shown, found by looking at all of it.
create or replace function pycontext._row_facts(
    content jsonb, tool_calls jsonb, role text, name text, tool_call_id text, is_orphan boolean, image_tokens integer,
    out tokens integer, out reasoning_tokens integer, out images smallint, out has_fence boolean, out is_plain boolean)
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_body text;
    k record;
begin
    if jsonb_typeof(content) = 'string' and tool_calls is null and name is null and role in ('user', 'assistant') then
        -- most rows, at half the cost
        v_body := content #>> '{}';
        has_fence := pycontext._has_fence(v_body);
        is_plain := not has_fence and pycontext._has_text(v_body);
        if is_plain then
            tokens := 4 + pycontext.estimate_tokens(v_body);
            reasoning_tokens := 0;
            images := 0;
            return;
        end if;
    end if;
    v_body := pycontext._content_text(content);
    has_fence := coalesce(pycontext._has_fence(v_body), false);
    is_plain := not (has_fence or is_orphan
        or case when jsonb_typeof(content) = 'string' then not pycontext._has_text(v_body)
            else pycontext._is_blank(content) or jsonb_typeof(content) = 'array' and exists (
                select from jsonb_array_elements(content) e
                where pycontext._part_kind(e.value) = 'text' and not pycontext._has_text(pycontext._part_text(e.value))) end
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

-- A source as it is registered, with the types and columns of its relation.
create or replace function pycontext._registered(source text)
returns pycontext.source
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source;
begin
    select s.* into f from pycontext.source s where s.source = _registered.source;
    if f.chat_type is null then
        f := pycontext._with_columns(f);
    end if;
    return f;
end
$$;

comment on function pycontext._registered(text) is 'Private. A source with the types and columns of its relation.';

-- Whether a text is a value of a type, for an id is cast to its relation's.
create or replace function pycontext._is_value(given text, type text)
returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if given is null or type in ('text', 'character varying', 'pg_catalog.bpchar') or given ~ (case type
        when 'bigint' then '^-?[0-9]{1,18}$' when 'integer' then '^-?[0-9]{1,9}$'
        when 'uuid' then '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' end) then
        return true;
    end if;
    -- a block of its own: to be ready for an error costs more than all the rest
    begin
        execute 'select $1::' || type using given;
        return true;
    exception when invalid_text_representation or numeric_value_out_of_range or invalid_datetime_format then
        return false;
    end;
end
$$;

comment on function pycontext._is_value(text, text) is 'Private. Whether a text is a value of a type.';

-- Rows of one kind (_source_query). An id that is no value of the relation's type names nothing there.
create or replace function pycontext._fetch_source(
    f pycontext.source, chat_id text, from_seq bigint, to_seq bigint, max_rows integer, kind text, encoding text default null,
    message_id text default null)
returns pycontext._source_batch
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch;
    v_from timestamp := case when f.order_type is not null then pycontext._time_at(from_seq) end;
    v_to timestamp := case when f.order_type is not null then pycontext._time_at(to_seq) end;
begin
    if not pycontext._is_value(chat_id, f.chat_type) or not pycontext._is_value(message_id, f.message_type) then
        k.looked_at := 0;
        return k;
    end if;
    begin
        k := pycontext._read_relation(chat_id, from_seq, to_seq, max_rows, message_id, v_from, v_to, encoding, f, kind);
        if k.looked_at is null then
            execute pycontext._source_query(f, kind) into k
            using chat_id, from_seq, to_seq, max_rows, message_id, v_from, v_to, encoding;
        end if;
    exception when undefined_table or invalid_schema_name or undefined_column or undefined_function or datatype_mismatch
            or cannot_coerce then
        perform pycontext._raise('PCX12', format('source %L cannot be read', f.source),
            coalesce(pycontext._source_fault(f), format('%s: %s', f.relation, sqlerrm)),
            'make the view again as it was, or with columns that will do, and register it anew: '
            'select pycontext.register_source(name, relation)');
    end;
    return k;
end
$$;

comment on function pycontext._fetch_source(pycontext.source, text, bigint, bigint, integer, text, text, text) is
    'Private. Rows of a product''s relation, read by one statement.';

-- Calls before the rows whose results are among them, no line being between, and what else answered those calls before
-- the rows; at most 512 rows before.
create or replace function pycontext._source_calls(
    f pycontext.source, chat_id text, source_rows pycontext._source_row[], encoding text)
returns pycontext._source_row[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch;
    v_more pycontext._source_batch;
    v_edge bigint;
    v_ids text[];
    v_call bigint;
begin
    select least(min(r.seq), source_rows[1].seq), array_agg(r.tool_call_id) into v_edge, v_ids
    from unnest(source_rows) r
    where r.role = 'tool' and r.tool_call_id is not null and not exists (
        select from unnest(source_rows) a
        where a.role = 'assistant' and a.seq < r.seq
            and a.tool_calls @> jsonb_build_array(jsonb_build_object('id', r.tool_call_id)))
    having count(*) > 0;
    if v_edge is null or exists (
        select from pycontext.message m
        where m.chat_id = _source_calls.chat_id and m.seq = v_edge - 1 and m.line_no > 0 and m.gone_act is null) then
        return null;
    end if;
    k := pycontext._fetch_source(f, chat_id, pycontext._origin(f.source), v_edge - 1, 512, 'calls', encoding);
    select min(r.seq) into v_call
    from unnest(k.rows) r
    cross join lateral jsonb_array_elements(r.tool_calls) e
    where e.value ->> 'id' = any (v_ids);
    if v_call is null then
        return null;
    end if;
    v_more := pycontext._fetch_source(f, chat_id, v_call + 1, v_edge - 1, 512, 'results', encoding);
    return array(
        select r from unnest(k.rows || array(
            select t from unnest(v_more.rows) t where t.role = 'tool' and t.tool_call_id = any (v_ids))) r
        order by r.seq);
end
$$;

comment on function pycontext._source_calls(pycontext.source, text, pycontext._source_row[], text) is
    'Private. Calls that stand before rows of a product''s relation with their results.';

-- The newest of these rows, back to where they take more than the budget, what is not counted being estimated: a row that
-- is not reached is not looked at. Where it can it ends with a user message, the request before what is in the window.
create or replace function pycontext._look_back(source_rows pycontext._source_row[], budget bigint, image_tokens integer)
returns pycontext._source_row[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    r pycontext._source_row;
    k record;
    v_first integer := cardinality(source_rows);
    v_tokens bigint := 0;
begin
    loop
        r := source_rows[v_first];
        if (r.count_hash = r.body_hash or r.role = 'tool' and r.count_hash = r.body_hash + 1) is not true then
            k := pycontext._row_facts(r.content, case when r.role = 'assistant' and jsonb_typeof(r.tool_calls) = 'array'
                and r.tool_calls <> '[]' then r.tool_calls end, r.role, r.name, r.tool_call_id, false, image_tokens);
            r.tokens := k.tokens;
            r.reasoning_tokens := k.reasoning_tokens;
            r.images := k.images;
            r.has_fence := k.has_fence;
            r.is_plain := k.is_plain;
            r.count_hash := null;
            source_rows[v_first] := r;
        end if;
        v_tokens := v_tokens + r.tokens;
        exit when v_first = 1 or v_tokens > budget and r.role = 'user'
            or v_tokens > budget * 17 / 16 and r.role <> 'tool';
        v_first := v_first - 1;
    end loop;
    return source_rows[v_first:];
end
$$;

comment on function pycontext._look_back(pycontext._source_row[], bigint, integer) is
    'Private. The newest of a product''s rows that a budget holds, estimated where they are not counted.';

-- The units of rows of a product, and which result takes the place of an interim one, by place in the array. null: a
-- result that belongs to no call.
create or replace function pycontext._source_units(
    chat_id text, source_rows pycontext._source_row[], out units bigint[], out superseded bigint[])
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_lines bigint[];
begin
    select array_agg(m.seq) into v_lines
    from pycontext.message m where m.chat_id = _source_units.chat_id and m.line_no > 0 and m.gone_act is null;
    with event as (
        select r.seq, e.value ->> 'id' as call_id, r.seq as call_seq, false as is_final
        from unnest(source_rows) r
        cross join lateral jsonb_array_elements(case when jsonb_typeof(r.tool_calls) = 'array' then r.tool_calls end) e
        where r.role = 'assistant'
        union all
        select r.seq, r.tool_call_id, null, coalesce(r.metadata ->> 'pending', '') <> 'true'
        from unnest(source_rows) r where r.role = 'tool'
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
    )
    select array_agg(case when r.role = 'tool' then u.unit_seq else r.seq end order by r.seq),
        array_agg(u.superseded_seq order by r.seq)
    into units, superseded
    from unnest(source_rows) r
    left join unit u on u.seq = r.seq and not u.is_closed and (v_lines is null or not exists (
        select from unnest(v_lines) l where l >= u.unit_seq and l < u.seq));
end
$$;

comment on function pycontext._source_units(text, pycontext._source_row[]) is
    'Private. The units of rows of a product''s relation.';

-- Rows of a chat that live in a relation of the product, in the shape of our own. Only this function, _read_source and
-- _thread_rows know where messages live. A call and a result more than 512 rows apart do not find each other.
create or replace function pycontext._source_rows(
    chat_id text, source text, from_seq bigint, to_seq bigint, max_rows integer, newest_first boolean,
    users_only boolean default false, message_id text default null, is_narrow boolean default false,
    first_turn boolean default false)
returns setof pycontext._stored_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(source);
    p record;
    k pycontext._source_batch;
    v_rows pycontext._source_row[];
    v_more pycontext._source_batch;
    v_units bigint[];
    v_superseded bigint[];
    v_ids text[];
    v_edge bigint := to_seq;
    v_first bigint;
    -- ranges are ranges of units, but for those read by seq from one end
    v_by_unit boolean := not newest_first and message_id is null and not users_only;
begin
    select coalesce(r.encoding, d.encoding) as encoding, coalesce(r.image_tokens, d.image_tokens) as image_tokens into p
    from pycontext.profile d
    left join pycontext.chat c on c.chat_id = _source_rows.chat_id
    left join pycontext.profile r on r.profile = c.profile
    where d.profile = 'default';
    k := pycontext._fetch_source(f, chat_id, from_seq, to_seq, max_rows, case when message_id is not null then 'id'
        else case when newest_first then 'newest' else 'oldest' end
            || case when users_only then ' user' when is_narrow then ' places' else '' end end, p.encoding, message_id);
    if k.rows is null then
        return;
    end if;
    v_rows := k.rows;
    v_first := v_rows[1].seq;
    if first_turn then
        -- up to the second user message
        v_rows := array(
            select r
            from (
                select r, count(*) filter (where r.role = 'user' and coalesce(r.metadata ->> 'injected', '') <> 'true')
                    over (order by r.seq rows between unbounded preceding and 1 preceding) as users
                from unnest(v_rows) r) q
            where q.users < 2
            order by (q.r).seq);
        if cardinality(v_rows) < cardinality(k.rows) then
            k.looked_at := max_rows;
        end if;
    end if;
    if k.has_calls and (not is_narrow or max_rows is distinct from 1) then
        v_rows := pycontext._source_calls(f, chat_id, v_rows, p.encoding) || v_rows;
    end if;
    if k.looked_at >= max_rows then
        v_edge := v_rows[cardinality(v_rows)].seq;
    end if;
    if k.has_calls and v_by_unit then
        -- results after what was read whose calls are in it; an id may be called again before they come
        if v_edge < 4611686018427387904 and exists (
            select from unnest(v_rows) r
            cross join lateral jsonb_array_elements(case when jsonb_typeof(r.tool_calls) = 'array' then r.tool_calls end) e
            where r.role = 'assistant' and r.seq >= from_seq and not exists (
                select from unnest(v_rows) t
                where t.role = 'tool' and t.tool_call_id = e.value ->> 'id' and t.seq > r.seq
                    and coalesce(t.metadata ->> 'pending', '') <> 'true')) then
            v_more := pycontext._fetch_source(f, chat_id, v_edge + 1, 4611686018427387904, 512, 'results', p.encoding);
            v_ids := array(
                select e.value ->> 'id'
                from unnest(v_rows) r
                cross join lateral jsonb_array_elements(case when jsonb_typeof(r.tool_calls) = 'array' then r.tool_calls end) e);
            v_rows := v_rows || array(
                select r from unnest(v_more.rows) r
                where r.role = 'tool' and r.tool_call_id = any (v_ids) or r.role = 'assistant' and exists (
                    select from jsonb_array_elements(r.tool_calls) e where e.value ->> 'id' = any (v_ids))
                order by r.seq);
        end if;
    end if;
    if k.has_calls then
        select u.units, u.superseded into v_units, v_superseded from pycontext._source_units(chat_id, v_rows) u;
    end if;
    return query
    select w.*
    from pycontext._shape_source(_source_rows.chat_id, v_rows, v_units, v_superseded, p.encoding, p.image_tokens, is_narrow) w
    -- past the edge only results of calls before it: the others' calls have not been read
    where case when v_by_unit then w.unit_seq between from_seq and v_edge else w.seq >= v_first end;
end
$$;

-- The newest rows of an adopted chat, back to lo_seq or until they take more than the budget, kept for this read: what
-- lies in walked_at is in walked.
create or replace function pycontext._read_source(s pycontext._window_state)
returns pycontext._window_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(s.source);
    k pycontext._source_batch;
    v_rows pycontext._source_row[];
    v_looked pycontext._source_row[];
    v_all pycontext._source_row[];
    v_units bigint[];
    v_superseded bigint[];
    v_has_calls boolean := false;
    v_read bigint := 0;
    v_tokens bigint := 0;
    v_to bigint := coalesce(s.hi_seq, 4611686018427387904);
    v_batch integer := least(greatest(s.token_budget / 80, 32), 2048);
    v_is_open boolean;
    v_is_all boolean;
begin
    loop
        k := pycontext._fetch_source(f, s.chat_id, s.lo_seq + 1, v_to, v_batch, 'newest', s.encoding);
        v_is_all := k.looked_at < v_batch;
        if k.looked_at > 0 then
            v_has_calls := v_has_calls or k.has_calls;
            v_read := v_read + k.looked_at;
            v_to := k.first_seq - 1;
            if not k.is_counted and k.rows is not null then
                v_looked := pycontext._look_back(k.rows, s.token_budget - v_tokens, s.image_tokens);
                if cardinality(v_looked) < cardinality(k.rows) then
                    v_is_all := false;
                    v_to := v_looked[1].seq - 1;
                end if;
                k.rows := v_looked;
            end if;
            v_rows := k.rows || v_rows;
        end if;
        if k.looked_at > 0 and v_rows is not null then
            v_all := v_rows;
            if v_has_calls then
                v_all := pycontext._source_calls(f, s.chat_id, v_rows, s.encoding) || v_rows;
                select u.units, u.superseded into v_units, v_superseded from pycontext._source_units(s.chat_id, v_all) u;
            end if;
            -- in order of seq, as they come
            select array_agg(w), sum(w.tokens), bool_or(w.calls > 0),
                array_agg(w.unit_seq) filter (where w.unit_seq = w.seq),
                array_agg(w.running_total - w.frozen_tokens) filter (where w.unit_seq = w.seq),
                array_agg(w.seq) filter (where w.is_user),
                coalesce(range_agg(int8range(w.unit_seq + 1, w.seq, '[]')) filter (where w.unit_seq < w.seq), '{}')
            into s.walked, v_tokens, v_is_open, s.walked_units, s.walked_starts, s.walked_users, s.straddles
            from pycontext._shape_source(s.chat_id, v_all, v_units, v_superseded, s.encoding, s.image_tokens) w
            where w.seq > v_to;
        end if;
        exit when v_is_all or (v_tokens > s.token_budget and v_rows[1].role <> 'tool');
        -- as many rows as the mean says, and a few
        v_batch := least(greatest((s.token_budget - v_tokens) * v_read / greatest(v_tokens, 1), 0) * 9 / 8 + 16, 2048);
    end loop;
    s.hi_seq := coalesce(s.hi_seq, v_rows[cardinality(v_rows)].seq);
    s.floor_seq := v_to + 1;
    if v_is_all or v_to = s.lo_seq then
        s.first_seq := v_rows[1].seq;
        s.floor_seq := s.lo_seq + 1;
    end if;
    s.has_open := s.has_open or coalesce(v_is_open, false);
    if s.hi_seq >= s.floor_seq then
        s.walked_at := int8multirange(int8range(s.floor_seq, s.hi_seq, '[]'));
    end if;
    s.total_base := -v_tokens;
    return s;
end
$$;

comment on function pycontext._read_source(pycontext._window_state) is
    'Private. Reads the newest rows of an adopted chat, as many as a window may hold.';

-- The newest real user message of an adopted chat between two places, kept with what has been read.
create or replace function pycontext._read_request(s pycontext._window_state, from_seq bigint, to_seq bigint)
returns pycontext._window_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_rows pycontext._stored_row[];
    v_seq bigint;
begin
    select array_agg(w), max(w.seq) into v_rows, v_seq
    from pycontext._source_rows(s.chat_id, s.source, from_seq, to_seq, 1, true, users_only => true) w
    where w.is_user;
    if v_seq is not null then
        s.walked_users := v_seq || s.walked_users;
        if (s.walked_at @> v_seq) is not true then
            s.walked := v_rows || s.walked;
            s.walked_at := coalesce(s.walked_at, '{}') + int8multirange(int8range(v_seq, v_seq, '[]'));
        end if;
    end if;
    return s;
end
$$;

comment on function pycontext._read_request(pycontext._window_state, bigint, bigint) is
    'Private. Reads the newest real user message of an adopted chat between two places.';

-- The first units of an adopted chat after lo_seq, kept with what has been read.
create or replace function pycontext._read_head(s pycontext._window_state)
returns pycontext._window_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch;
    v_all pycontext._stored_row[];
    v_rows pycontext._stored_row[];
    v_edge bigint;
    v_is_open boolean;
begin
    if s.walked_at @> s.lo_seq + 1 then
        return s;
    end if;
    k := pycontext._fetch_source(pycontext._registered(s.source), s.chat_id, s.lo_seq + 1, s.hi_seq, 16, 'oldest', s.encoding);
    if k.has_calls or not k.is_counted then
        select array_agg(w) into v_all
        from pycontext._source_rows(s.chat_id, s.source, s.lo_seq + 1, s.hi_seq, 16, false, first_turn => true) w;
    else
        select array_agg(w) into v_all
        from pycontext._shape_source(s.chat_id, k.rows, null, null, s.encoding, s.image_tokens) w;
    end if;
    -- by seq: a late result is there, though its unit is not
    select array_agg(w) filter (where (s.walked_at @> w.seq) is not true), min(w.seq), max(w.unit_seq),
        bool_or(w.calls > 0)
    into v_rows, s.first_seq, v_edge, v_is_open
    from unnest(v_all) w;
    if v_edge is not null then
        s.walked := v_rows || s.walked;
        s.walked_at := coalesce(s.walked_at, '{}') + int8multirange(int8range(s.lo_seq + 1, v_edge, '[]'));
        s.has_open := s.has_open or v_is_open;
    end if;
    return s;
end
$$;

comment on function pycontext._read_head(pycontext._window_state) is 'Private. Reads the first units of an adopted chat.';

-- The one reader of a thread. Rows (not lines) as they stood at act as_of_act (null: now). Ways in: ranges of whole
-- units, section_no telling which; newest_first, max_rows by seq; with min_start starts of units, among them the range's
-- first and the first at or after that running total; one message_id. Every way is an index scan that stops where it may.
-- What lies in walked_at has been read before, into walked: whole units of an adopted chat are taken from there.
-- (seq <= unit_seq is what starts a unit: of an equality the planner thinks that it is rare, and sorts.)
create or replace function pycontext._thread_rows(
    chat_id text, source text, from_seq bigint[], to_seq bigint[], as_of_act bigint default null,
    max_rows integer default null, newest_first boolean default false, min_start bigint default null,
    message_id text default null, users_only boolean default false, walked pycontext._stored_row[] default null,
    walked_at int8multirange default null)
returns setof pycontext._thread_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
begin
    if source is not null then
        if walked_at @> (
            select range_agg(int8range(g.lo, g.hi, '[]')) from unnest(from_seq, to_seq) g (lo, hi) where g.lo <= g.hi) then
            return query
            select g.n::integer, w.*
            from unnest(walked) w
            join unnest(from_seq, to_seq) with ordinality g (lo, hi, n)
                on case when newest_first then w.seq else w.unit_seq end between g.lo and g.hi;
        else
            return query
            select g.n::integer, s.*
            from unnest(from_seq, to_seq) with ordinality g (lo, hi, n)
            cross join lateral pycontext._source_rows(_thread_rows.chat_id, source, g.lo, g.hi, max_rows, newest_first,
                users_only, _thread_rows.message_id) s
            where min_start is null or s.seq = s.unit_seq;
        end if;
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
