comment on column pycontext.source.chat_type is 'Type that a chat id is cast to before the relation is asked for it.';
comment on column pycontext.source.message_type is 'Type that a message id is cast to.';
comment on column pycontext.source.order_type is 'Type of its column order_at, where seq is made of a time; else null.';
comment on column pycontext.source.has_columns is 'Which of tool_calls, tool_call_id, name and metadata the relation has.';
comment on column pycontext.source.definition is
    'Hash of how the relation is made: where another is registered under the name, what was derived is looked at again.';
comment on column pycontext.token_count.body_hash is
    'Adopted chats: hash of the row as it was counted; where it reads otherwise now, the count is not used.';
comment on column pycontext.token_count.reasoning_tokens is 'Adopted chats: tokens of its reasoning parts, estimated.';
comment on column pycontext.token_count.images is 'Adopted chats: how many images it has.';
comment on column pycontext.token_count.has_fence is 'Adopted chats: whether its text has one of our fence tags in it.';
comment on column pycontext.token_count.is_plain is 'Adopted chats: whether it is sent as it stands.';

-- The types and optional columns of a source's relation, from the catalog. A domain is its base type; `character` is
-- named so that a cast does not cut.
create or replace function pycontext._with_columns(f pycontext.source)
returns pycontext.source
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    a record;
begin
    f.has_columns := '{}';
    for a in
        select x.attname, case when t.typname = 'bpchar' then 'pg_catalog.bpchar' else x.atttypid::regtype::text end as type
        from pg_catalog.pg_attribute x
        join pg_catalog.pg_type t on t.oid = x.atttypid
        where x.attrelid = f.relation::regclass and x.attnum > 0 and not x.attisdropped
    loop
        case a.attname
            when 'chat_id' then f.chat_type := a.type;
            when 'message_id' then f.message_type := a.type;
            when 'order_at' then f.order_type := a.type;
            when 'tool_calls', 'tool_call_id', 'name', 'metadata' then f.has_columns := f.has_columns || a.attname::text;
            else null;
        end case;
    end loop;
    return f;
end
$$;

comment on function pycontext._with_columns(pycontext.source) is
    'Private. A source with the types and optional columns of its relation.';

-- What of a source's relation is no longer as it was registered; null: nothing, or it is not for the caller to know.
create or replace function pycontext._source_fault(f pycontext.source)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    n pycontext.source;
begin
    if to_regclass(f.relation) is null then
        return format('%s is gone', f.relation);
    end if;
    n := pycontext._with_columns(f);
    return (
        select format('%s: %s', f.relation, string_agg(q.fault, ', '))
        from (
            select 'no column ' || m.name as fault
            from pycontext._missing_columns(f.relation::regclass,
                f.has_columns || case when f.order_type is not null then array['order_at'] end) m (name)
            union all
            select format('%s is %s, was %s', t.name, t.now, t.was)
            from (values ('chat_id', f.chat_type, n.chat_type), ('message_id', f.message_type, n.message_type),
                ('order_at', f.order_type, n.order_type)) t (name, was, now)
            where t.was <> t.now) q
        having count(*) > 0);
exception when insufficient_privilege then
    return null;
end
$$;

comment on function pycontext._source_fault(pycontext.source) is
    'Private. What of a source''s relation is no longer as it was registered.';

-- Notes them with a source, so that a read need not look.
create or replace function pycontext._learn_source(name text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source;
begin
    select w.* into f
    from pycontext.source s cross join lateral pycontext._with_columns(s) w
    where s.source = name;
    update pycontext.source s
    set chat_type = f.chat_type, message_type = f.message_type, order_type = f.order_type, has_columns = f.has_columns,
        definition = md5(concat_ws(E'\n', f.relation, f.chat_type, f.order_type, f.has_columns, (
            select v.definition from pg_catalog.pg_views v
            where format('%I.%I', v.schemaname, v.viewname) = f.relation)))
    where s.source = name;
end
$$;

comment on function pycontext._learn_source(text) is
    'Private. Keeps the types and optional columns of a source''s relation with its registration.';

-- Rows of a product in the shape of our own: counts and totals are made here. Totals end with 0 at the newest. units null:
-- there are no calls. Narrow: places only, nothing is counted and no content returned. An expression of its caller's: so
-- it has no settings.
create or replace function pycontext._shape_source(
    chat_id text, source_rows pycontext._source_row[], units bigint[], superseded bigint[], encoding text,
    image_tokens integer, is_narrow boolean default false)
returns setof pycontext._stored_row
language sql stable
as $$
    with counted as (
        select d.*, o.is_orphan, d.role = 'assistant' and jsonb_typeof(d.tool_calls) = 'array' and d.tool_calls <> '[]' as is_call,
            d.count_hash = d.body_hash + o.is_orphan::integer as is_counted,
            d.tokens is not null and coalesce(d.count_hash = d.body_hash + o.is_orphan::integer, not o.is_orphan) as is_known
        from rows from (unnest(source_rows), unnest(units), unnest(superseded)) with ordinality d (seq, message_id, role, content,
            tool_calls, tool_call_id, name, metadata, created_at, body_hash, tokens, reasoning_tokens, images, has_fence,
            is_plain, count_hash, unit_seq, superseded_seq, n)
        cross join lateral (select (d.role = 'tool' and d.unit_seq is null) as is_orphan) o
    )
    select _shape_source.chat_id, null::bigint, c.seq, 0::smallint, 'message'::text, c.role, coalesce(c.unit_seq, c.seq),
        x.tokens, x.tokens, x.tokens, coalesce(k.reasoning_tokens, c.reasoning_tokens),
        (sum(x.tokens) over (order by c.n) - sum(x.tokens) over ())::bigint, 0::bigint, coalesce(k.images, c.images),
        case when c.is_call then jsonb_array_length(c.tool_calls) else 0 end::smallint,
        c.role = 'user' and coalesce(c.metadata ->> 'injected', '') <> 'true', coalesce(k.is_plain, c.is_plain),
        coalesce(k.has_fence, c.has_fence), null::bigint, c.superseded_seq, 0::bigint,
        case when c.is_counted then _shape_source.encoding end, c.message_id, c.tool_call_id, c.name, c.created_at,
        null::text, null::text, null::jsonb, case when not is_narrow then c.content end,
        case when c.is_call and not is_narrow then case when exists (
                select from jsonb_array_elements(c.tool_calls) e
                where jsonb_typeof(e.value #> '{function,arguments}') is distinct from 'string')
            then pycontext._clean_calls(c.tool_calls) else c.tool_calls end end,
        case when not is_narrow then c.metadata end, null::jsonb
    from counted c
    -- offset 0: a row that is known is not looked at
    left join lateral (
        select q.* from pycontext._row_facts(c.content, case when c.is_call then c.tool_calls end, c.role, c.name,
            c.tool_call_id, c.is_orphan, _shape_source.image_tokens) q
        where not c.is_known and not _shape_source.is_narrow
        offset 0) k on true
    cross join lateral (select coalesce(k.tokens, c.tokens) as tokens) x
    order by c.n
$$;

comment on function pycontext._shape_source(text, pycontext._source_row[], bigint[], bigint[], text, integer, boolean) is
    'Private. Rows of a product''s relation in the shape of our own.';

-- Place, count and digest of the rows after after_seq up to to_seq: what a line is compared with later.
create or replace function pycontext._segment_digest(chat_id text, source text, after_seq bigint, to_seq bigint)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(source);
    k pycontext._source_batch;
begin
    k := pycontext._fetch_source(f, chat_id, after_seq + 1, to_seq, null, 'all');
    return (
        select format('%s:%s:%s', after_seq, count(*), left(encode(sha256(convert_to(coalesce(string_agg(
            format('%s %s', r.seq, r.body_hash), ',' order by r.seq), ''), 'UTF8')), 'hex'), 24))
        from unnest(k.rows) r);
end
$$;

comment on function pycontext._segment_digest(text, text, bigint, bigint) is
    'Private. Place, count and digest of the original rows of a segment.';

-- The newest places of a segment, 256 at most: cheap enough to be compared at every read. A late commit lands there.
create or replace function pycontext._segment_edge(chat_id text, source text, after_seq bigint, to_seq bigint)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch;
begin
    k := pycontext._fetch_source(pycontext._registered(source), chat_id, after_seq + 1, to_seq, 256, 'edge');
    return format('%s:%s', k.looked_at, k.tokens);
end
$$;

comment on function pycontext._segment_edge(text, text, bigint, bigint) is
    'Private. The newest places of a segment, as a line notes them.';

-- Whether the newest places under a line of an adopted chat are those it was made of.
create or replace function pycontext._has_edge(l pycontext.message, source text)
returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(l.summary #>> '{covers,edge}' = pycontext._segment_edge(l.chat_id, source,
        split_part(l.summary #>> '{covers,digest}', ':', 1)::bigint, l.seq), true);
end
$$;

comment on function pycontext._has_edge(pycontext.message, text) is
    'Private. Whether the newest places under a line are those it was made of.';

-- The live compaction lines of an adopted chat whose segment no longer reads as it did: rows came, went or changed.
-- over_seq: of the line whose segment holds that place alone.
create or replace function pycontext._stale_lines(chat_id text, over_seq bigint default null)
returns table (seq bigint, line_no smallint, message_id text)
language sql stable
as $$
    select m.seq, m.line_no, m.message_id
    from pycontext.message m
    join pycontext.chat c on c.chat_id = m.chat_id
    cross join lateral (select m.summary #>> '{covers,digest}' as digest) d
    where m.chat_id = _stale_lines.chat_id and m.line_no > 0 and m.gone_act is null and m.origin = 'compaction'
        and (over_seq is null or m.seq = (
            select min(x.seq) from pycontext.message x
            where x.chat_id = m.chat_id and x.line_no > 0 and x.gone_act is null and x.origin = 'compaction'
                and x.seq >= over_seq))
        and c.source is not null and d.digest is distinct from
            pycontext._segment_digest(m.chat_id, c.source, split_part(d.digest, ':', 1)::bigint, m.seq)
        and d.digest is not null
$$;

comment on function pycontext._stale_lines(text, bigint) is
    'Private. Lines of an adopted chat whose original rows have changed since.';

-- Marks gone what is stale and every compaction line after it, which was merged from it, and deletes the facts whose rows
-- are gone or read otherwise. Returns how many lines went.
create or replace function pycontext._drop_stale(c pycontext.chat, from_seq bigint)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer;
begin
    perform pycontext._erase_unfounded(c);
    if from_seq is null or not exists (
        select from pycontext.message m
        where m.chat_id = c.chat_id and m.line_no > 0 and m.origin = 'compaction' and m.gone_act is null and m.seq >= from_seq) then
        return 0;
    end if;
    c := pycontext._log_act(c, 'stale', true, jsonb_build_object('from_seq', from_seq));
    update pycontext.message m set gone_act = c.act_no
    where m.chat_id = c.chat_id and m.line_no > 0 and m.origin = 'compaction' and m.gone_act is null and m.seq >= from_seq;
    get diagnostics v_count = row_count;
    perform pycontext._refresh_chat(c.chat_id);
    return v_count;
end
$$;

comment on function pycontext._drop_stale(pycontext.chat, bigint) is
    'Private. Deletes facts without their rows, and marks the compaction lines at or after a place gone, as a logged act.';

-- The same for who reads with rights of his own: a turn that met a stale line.
create or replace function pycontext._drop_lines(chat_id text, from_seq bigint)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return pycontext._drop_stale(pycontext._lock_chat(chat_id, false), from_seq);
end
$$;

comment on function pycontext._drop_lines(text, bigint) is
    'Private. Marks the stale lines of an adopted chat from a place on as gone.';

-- Deletes the counts and embeddings of rows that a product's relation has no more.
create or replace function pycontext._erase_unread(c pycontext.chat)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch := pycontext._fetch_source(pycontext._registered(c.source), c.chat_id,
        pycontext._origin(c.source), 4611686018427387904, null, 'newest places');
begin
    delete from pycontext.token_count t
    where t.chat_id = c.chat_id and t.line_no = 0 and t.seq not in (select r.seq from unnest(k.rows) r);
    if to_regclass('pycontext.embedding') is not null then
        delete from pycontext.embedding e
        where e.chat_id = c.chat_id and e.fact_id = '' and e.seq not in (select r.seq from unnest(k.rows) r);
    end if;
end
$$;

comment on function pycontext._erase_unread(pycontext.chat) is
    'Private. Deletes counts and embeddings of an adopted chat whose rows are gone.';

-- A row of an adopted chat was changed or deleted: what was made of it is dropped. message_id null looks for what is
-- stale by itself. Returns how many lines were set aside. PCX01, PCX09 for a native chat.
create or replace function pycontext.source_changed(chat_id text, message_id text default null)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    v_seq bigint;
    v_stale bigint;
    v_count integer;
begin
    if c.source is null then
        perform pycontext._raise('PCX02', 'this chat lives in pycontext''s own table', format('chat_id is %L', chat_id),
            'its rows are changed by redact_message and rewind_chat only');
    end if;
    if message_id is not null then
        select r.seq into v_seq
        from pycontext._thread_rows(c.chat_id, c.source, array[pycontext._origin(c.source)], array[4611686018427387904], null,
            1, true, message_id => source_changed.message_id) r;
    end if;
    if v_seq is null then
        -- deleted, or not named: whatever has no row any more, and wherever the rows under a line are not those it was
        -- made from
        perform pycontext._erase_unread(c);
        select min(t.seq) into v_stale from pycontext._stale_lines(c.chat_id) t;
    else
        delete from pycontext.token_count t where t.chat_id = c.chat_id and t.seq = v_seq and t.line_no = 0;
        perform pycontext._erase_facts(c.chat_id, v_seq);
        v_stale := v_seq;
    end if;
    v_count := pycontext._drop_stale(c, v_stale);
    if v_count = 0 then
        -- no line covers it, but a summary may be in the making, or an earlier window have shown it
        perform pycontext._log_act(c, 'stale', true, jsonb_strip_nulls(jsonb_build_object('message_id', message_id)));
    end if;
    return v_count;
end
$$;

comment on function pycontext.source_changed(text, text) is
    'Tells that a message of an adopted chat was changed or deleted in the product''s table: its count, the facts and the '
    'lines made of it are dropped, and a summary in the making is refused. message_id null: it looks for lines and facts whose '
    'rows changed unannounced. Returns how many lines were set aside; the next compaction makes them anew. Errors: PCX01, '
    'PCX02 the chat is not adopted.';

-- After a source was registered again: where its relation is made otherwise, what was made of rows that do not read as they
-- did is dropped in each of its chats, and their facts are owed again. PCX12 where places mean something else.
create or replace function pycontext._recheck_source(was pycontext.source)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(was.source);
    c pycontext.chat;
    v_stale bigint;
    v_from bigint;
    v_lines bigint := 0;
    v_facts bigint;
begin
    if was.source is null or f.definition is not distinct from was.definition then
        return;
    end if;
    if (f.order_type is null) <> (was.order_type is null) and exists (
        select from pycontext.message m join pycontext.chat t on t.chat_id = m.chat_id where t.source = f.source) then
        perform pycontext._raise('PCX12', 'the relation counts its places otherwise than the one of that name',
            format('source %L has lines at places of %s', f.source, was.relation),
            format('register it under another name; or first, with all that was derived: select pycontext.forget_source(%L)', f.source));
    end if;
    select count(*) into v_facts
    from pycontext.fact t join pycontext.chat k on k.chat_id = t.chat_id where k.source = f.source and t.content is not null;
    for c in select t.* from pycontext.chat t where t.source = f.source order by t.chat_id for update loop
        perform pycontext._erase_unread(c);
        select min(t.seq), min(split_part(m.summary #>> '{covers,digest}', ':', 1)::bigint) into v_stale, v_from
        from pycontext._stale_lines(c.chat_id) t
        join pycontext.message m on m.chat_id = c.chat_id and m.seq = t.seq and m.line_no = t.line_no;
        v_lines := v_lines + pycontext._drop_stale(c, v_stale);
        update pycontext.chat t set flushed_seq = v_from where t.chat_id = c.chat_id and t.flushed_seq > v_from;
    end loop;
    select v_facts - count(*) into v_facts
    from pycontext.fact t join pycontext.chat k on k.chat_id = t.chat_id where k.source = f.source and t.content is not null;
    if v_lines > 0 or v_facts > 0 then
        raise warning 'source % reads otherwise now: % and % made of rows that are not there any more were dropped', f.source,
            v_lines || case when v_lines = 1 then ' line' else ' lines' end,
            v_facts || case when v_facts = 1 then ' fact' else ' facts' end;
    end if;
end
$$;

comment on function pycontext._recheck_source(pycontext.source) is
    'Private. Drops what was derived of rows that a source registered again does not have.';

-- Takes a source back with everything derived from it. The product's table is not touched. Returns how many chats went.
create or replace function pycontext.forget_source(name text)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_chats text[];
begin
    perform s.source from pycontext.source s where s.source = name for update;
    if not found then
        perform pycontext._raise('PCX12', 'no such source', format('source is %L', name),
            'see: select source, relation from pycontext.source');
    end if;
    select array_agg(c.chat_id order by c.chat_id) into v_chats from pycontext.chat c where c.source = name;
    perform c.chat_id from pycontext.chat c where c.chat_id = any(v_chats) order by c.chat_id for update;
    perform pycontext._erase(v_chats);
    delete from pycontext.source s where s.source = name;
    perform pycontext._compile_sources();
    return coalesce(cardinality(v_chats), 0);
end
$$;

comment on function pycontext.forget_source(text) is
    'Takes a source back: every line, count, pass, pin and fact of its chats is deleted, and its registration; the '
    'product''s own table stays as it is. Returns how many chats had something derived. Error: PCX12 no such source.';

-- The newest row before a border that a line may stand after: nothing at or before it is younger than settle_seconds
-- (ids may commit out of order), and no unit lies on both sides.
create or replace function pycontext._settled_row(s pycontext._window_state, border_seq bigint, settle_seconds integer)
returns pycontext._place_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(s.source);
    k pycontext._source_batch;
    v_seq bigint;
    v_since timestamptz := statement_timestamp() - make_interval(secs => settle_seconds);
    v_until timestamptz := statement_timestamp() + interval '1 day';  -- a time beyond says nothing of when it came
    r pycontext._place_row;
begin
    k := pycontext._fetch_source(f, s.chat_id, s.lo_seq + 1, border_seq - 1, 256, 'newest places');
    if k.rows is null then
        return null;
    end if;
    if not k.has_calls and not 'tool_call_id' = any (f.has_columns) then
        -- each row is a unit
        select p.seq, p.message_id, p.seq, p.role = 'user' into r.seq, r.message_id, r.unit_seq, r.is_user
        from (select t.*, bool_or(t.created_at between v_since and v_until) over (order by t.seq) as is_young from unnest(k.rows) t) p
        where not p.is_young
        order by p.seq desc limit 1;
        v_seq := case when r.is_user then r.seq end;  -- what it costs is asked of a request only
    else
        select max(p.seq) into v_seq
        from (
            select q.seq, bool_or(q.created_at between v_since and v_until) over w as is_young, max(q.last_seq) over w as last_seq
            from (
                select t.seq, t.created_at, max(t.seq) over (partition by t.unit_seq) as last_seq
                from pycontext._source_rows(s.chat_id, s.source, k.rows[1].seq, s.hi_seq, null, true, is_narrow => true) t) q
            window w as (order by q.seq)) p
        where p.seq < border_seq and not p.is_young and p.last_seq = p.seq;
    end if;
    if v_seq is not null then
        r := pycontext._row_at(s, v_seq);
    end if;
    return r;
end
$$;

comment on function pycontext._settled_row(pycontext._window_state, bigint, integer) is
    'Private. The row of an adopted chat that a line before a border stands after.';

-- The oldest call of an adopted chat before a border that still waits: for a person, or in the newest turn. Looks as far
-- back as a result finds its call, 512 rows.
create or replace function pycontext._waiting_unit(s pycontext._window_state, border_seq bigint)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(s.source);
    k pycontext._source_batch;
    v_more pycontext._source_batch;
begin
    if not 'tool_calls' = any (f.has_columns) then
        return null;  -- none is a call
    end if;
    k := pycontext._fetch_source(f, s.chat_id, s.lo_seq + 1, border_seq - 1, 512, 'newest places');
    if not exists (
        select from unnest(k.rows) r
        where r.metadata ->> 'pending' = 'true' or r.role = 'assistant' and r.seq > s.turn_seq and r.tool_calls is not null) then
        return null;
    end if;
    v_more := pycontext._fetch_source(f, s.chat_id, border_seq, 4611686018427387904, 512, 'results');
    return (
        with called as (
            select r.seq, e.value ->> 'id' as id, r.metadata ->> 'pending' = 'true' as is_pending
            from unnest(k.rows || v_more.rows) r
            cross join lateral jsonb_array_elements(case when jsonb_typeof(r.tool_calls) = 'array' then r.tool_calls end) e
            where r.role = 'assistant'
        ), told as (
            select t.tool_call_id as id, coalesce(t.metadata ->> 'pending', '') <> 'true' as is_final, (
                select max(c.seq) from called c where c.id = t.tool_call_id and c.seq < t.seq) as unit_seq
            from unnest(k.rows || v_more.rows) t
            where t.role = 'tool'
        )
        select min(c.seq)
        from called c
        where c.seq < border_seq and not exists (select from told t where t.unit_seq = c.seq and t.id = c.id and t.is_final)
            and (c.is_pending or c.seq > s.turn_seq or exists (select from told t where t.unit_seq = c.seq and t.id = c.id)));
end
$$;

comment on function pycontext._waiting_unit(pycontext._window_state, bigint) is
    'Private. The oldest call of an adopted chat before a border that waits for a person, or in the newest turn.';

-- Whether a unit of an adopted chat has rows on both sides of a place.
create or replace function pycontext._splits_unit(chat_id text, source text, place bigint)
returns boolean
language sql stable
as $$
    select exists (
        select from pycontext._source_rows(chat_id, source, (
                select min(b.seq) - 1
                from pycontext._source_rows(chat_id, source, pycontext._origin(source), place, 256, true, is_narrow => true) b),
            place, null, false, is_narrow => true) r
        where r.seq > place)
$$;

comment on function pycontext._splits_unit(text, text, bigint) is
    'Private. Whether a line after a place would split a unit of an adopted chat.';

-- What a window of an adopted chat reads and no tokenizer has counted as it reads now, the newest max_rows of it; with the
-- chat's lines and its system prompt.
create or replace function pycontext._uncounted_source(c pycontext.chat, encoding text, image_tokens integer, max_rows integer)
returns setof pycontext.uncounted_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state;
begin
    if exists (select from pycontext._source_rows(c.chat_id, c.source, pycontext._origin(c.source), 4611686018427387904, 1, true,
        is_narrow => true)) then
        s := pycontext._chat_state(c.chat_id, null, null);
        -- half as far again: counted, rows take less, and a window holds more of them
        s := pycontext._chat_state(c.chat_id, least(1.5 * s.token_budget * s.token_scale, 2147483647)::integer, null);
        s := pycontext._read_head(s);
    end if;
    return query
    with shown as (
        select w.* from unnest(s.walked) w
        union
        -- what stands before that: the line's first turn and request, and pins
        select r.*
        from (
            select s.head_from, s.head_to where s.line_origin = 'compaction'
            union all
            select s.request_seq, s.request_seq where s.line_origin = 'compaction'
            union all
            select p.unit_seq, p.to_seq from pycontext._pins_of(s) p) g (lo, hi)
        cross join lateral pycontext._source_rows(c.chat_id, c.source, g.lo, g.hi, null, false) r
        where g.lo is not null and (s.walked_at @> g.lo) is not true
    )
    select r.seq, r.line_no, r.message_id, k.overhead, k.texts || k.reasoning, _uncounted_source.encoding
    from (
        select w.* from shown w
        where w.encoding is distinct from _uncounted_source.encoding
        order by w.seq desc limit max_rows) r
    cross join lateral pycontext._count_pieces(
        case when r.is_plain then r.content
            else pycontext._rendered(r.content, r.has_fence, r.role = 'tool' and r.unit_seq = r.seq, r.tool_call_id,
                r.calls > 0) end,
        r.tool_calls, case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end, r.name, image_tokens) k
    union all
    select m.seq, m.line_no, m.message_id, 4,
        array[pycontext._line_text(m.origin, m.covers_from, m.seq, m.content #>> '{}')], _uncounted_source.encoding
    from pycontext.message m
    where m.chat_id = c.chat_id and m.encoding is null and m.line_no > 0 and m.gone_act is null
    union all
    select 0, 0::smallint, null, 4, array[t.content], _uncounted_source.encoding
    from pycontext.prompt t
    where t.chat_id = c.chat_id and t.encoding is null
        and t.act_no = (select max(q.act_no) from pycontext.prompt q where q.chat_id = c.chat_id);
end
$$;

comment on function pycontext._uncounted_source(pycontext.chat, text, integer, integer) is
    'Private. What uncounted_messages returns for an adopted chat in its own encoding.';

-- Keeps counts of an adopted chat, rows with what else a read needs to know of them; those that are not there any more
-- are passed over. Returns how many were new.
create or replace function pycontext._cache_source_counts(c pycontext.chat, encoding text, image_tokens integer, counts jsonb)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.source := pycontext._registered(c.source);
    k pycontext._source_batch;
    c_rows constant integer := 256;
    v_seqs bigint[] := array(select (e.value ->> 'seq')::bigint from jsonb_array_elements(counts) e
        where coalesce((e.value ->> 'line_no')::integer, 0) = 0 and (e.value ->> 'seq' <> '0'
            or not exists (select from pycontext.prompt t where t.chat_id = c.chat_id)) order by 1);
    v_from bigint := v_seqs[1];
    v_count integer := 0;
    v_more integer;
begin
    -- by and by: they may lie far apart
    while v_from is not null loop
        k := pycontext._fetch_source(f, c.chat_id, v_from, v_seqs[cardinality(v_seqs)], c_rows, 'all');
        insert into pycontext.token_count as t (chat_id, seq, line_no, encoding, tenant, tokens, body_hash, reasoning_tokens,
            images, has_fence, is_plain)
        select c.chat_id, r.seq, 0, _cache_source_counts.encoding, c.tenant, n.tokens, r.body_hash + o.is_orphan::integer,
            q.reasoning_tokens, q.images, q.has_fence, q.is_plain
        from unnest(k.rows) r
        join (
            select (e.value ->> 'seq')::bigint as seq, max((e.value ->> 'tokens')::integer) as tokens
            from jsonb_array_elements(counts) e
            where coalesce((e.value ->> 'line_no')::integer, 0) = 0
            group by 1) n on n.seq = r.seq
        cross join lateral (select r.role = 'tool' and not exists (
            select from pycontext._source_rows(c.chat_id, c.source, r.seq, r.seq, null, true, is_narrow => true) x
            where x.unit_seq < x.seq) as is_orphan) o
        cross join lateral pycontext._row_facts(r.content, case when r.role = 'assistant'
            and jsonb_typeof(r.tool_calls) = 'array' and r.tool_calls <> '[]' then r.tool_calls end, r.role, r.name,
            r.tool_call_id, o.is_orphan, _cache_source_counts.image_tokens) q
        order by r.seq
        on conflict on constraint token_count_pk do update
        set tokens = excluded.tokens, body_hash = excluded.body_hash, reasoning_tokens = excluded.reasoning_tokens,
            images = excluded.images, has_fence = excluded.has_fence, is_plain = excluded.is_plain
        where t.body_hash is distinct from excluded.body_hash;
        get diagnostics v_more = row_count;
        v_count := v_count + v_more;
        exit when k.looked_at < c_rows;
        v_from := v_seqs[width_bucket(greatest(v_from, k.rows[cardinality(k.rows)].seq), v_seqs) + 1];
    end loop;
    update pycontext.message m
    set tokens = (e.value ->> 'tokens')::integer, encoding = _cache_source_counts.encoding
    from jsonb_array_elements(counts) e
    where m.chat_id = c.chat_id and m.seq = (e.value ->> 'seq')::bigint and m.line_no > 0
        and m.line_no = (e.value ->> 'line_no')::smallint and m.encoding is null;
    get diagnostics v_more = row_count;
    v_count := v_count + v_more;
    update pycontext.prompt q
    set tokens = (e.value ->> 'tokens')::integer, encoding = _cache_source_counts.encoding
    from jsonb_array_elements(counts) e
    where q.chat_id = c.chat_id and q.encoding is null and (e.value ->> 'seq')::bigint = 0
        and coalesce((e.value ->> 'line_no')::integer, 0) = 0
        and q.act_no = (select max(z.act_no) from pycontext.prompt z where z.chat_id = c.chat_id);
    get diagnostics v_more = row_count;
    return v_count + v_more;
end
$$;

comment on function pycontext._cache_source_counts(pycontext.chat, text, integer, jsonb) is
    'Private. What cache_token_counts does for an adopted chat in its own encoding.';
