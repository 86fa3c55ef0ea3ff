-- Recall by meaning: embeddings of facts and past messages, with pgvector 0.8 or newer (whose creation may want a superuser:
-- create extension vector beforehand). Run it by the role that installed, after each install; harmless to run again. The first call of use_embedding_model says which model it is; another one
-- later means: truncate pycontext.embedding, pycontext.embedded_chat, pycontext.embedding_model; drop index
-- pycontext.embedding_ann_ix. Everything is embedded anew then.
-- Who may read a chat's embeddings may guess at its text: roles.sql and row_level_security.sql treat both alike; run them
-- again after this file.

do $$
begin
    perform pg_catalog.pg_advisory_xact_lock(7234015113000001);
    if not exists (select from pg_catalog.pg_extension e where e.extname = 'vector') then
        create extension vector schema public;
    end if;
    if (select pg_catalog.string_to_array(e.extversion, '.')::integer[] < array[0, 8] from pg_catalog.pg_extension e
        where e.extname = 'vector') then
        raise exception 'pgvector is too old' using errcode = '0A000', detail = 'it must be 0.8.0 or newer',
            hint = 'install a newer pgvector, then: alter extension vector update';
    end if;
    if pg_catalog.to_regclass('pycontext.embedding') is null then
        create table pycontext.embedding_model (
            model text collate "C" not null,
            dimension integer not null,
            created_at timestamptz not null default pg_catalog.now(),
            constraint embedding_model_pk primary key (model),
            constraint embedding_model_dimension_ck check (dimension between 1 and 16000)
        );
        -- one model at a time
        create unique index embedding_model_one on pycontext.embedding_model ((true));
        create table pycontext.embedded_chat (
            chat_id text collate "C" not null,
            tenant text collate "C" not null default '',
            seq bigint not null,
            flushed_seq bigint,
            embedded_at timestamptz not null,
            constraint embedded_chat_pk primary key (chat_id),
            constraint embedded_chat_fk foreign key (chat_id) references pycontext.chat (chat_id)
        );
        -- whatever schema the extension is in
        execute pg_catalog.format($table$
            create table pycontext.embedding (
                chat_id text collate "C" not null,
                seq bigint not null,
                fact_id text collate "C" not null default '',
                part_no integer not null default 0,
                tenant text collate "C" not null default '',
                owner text collate "C",
                message_id text collate "C",
                is_user boolean not null,
                from_char integer not null,
                stated_at timestamptz not null,
                embedding %1$s.vector not null,
                constraint embedding_pk primary key (chat_id, seq, fact_id, part_no),
                constraint embedding_chat_fk foreign key (chat_id) references pycontext.chat (chat_id)
            )$table$, (select e.extnamespace::pg_catalog.regnamespace from pg_catalog.pg_extension e where e.extname = 'vector'));
        create index embedding_owner_ix on pycontext.embedding (tenant, owner) where owner is not null;
        create index fact_remembered_ix on pycontext.fact (chat_id, created_at) where source = 'remember' and gone_at is null;
    end if;
end
$$;

comment on table pycontext.embedding_model is 'The one model that embeddings are of.';
comment on column pycontext.embedding_model.model is 'Its name.';
comment on column pycontext.embedding_model.dimension is 'How many numbers an embedding of it has.';
comment on column pycontext.embedding_model.created_at is 'When it was named.';
comment on table pycontext.embedded_chat is 'How far the messages of each chat are embedded.';
comment on column pycontext.embedded_chat.chat_id is 'The chat.';
comment on column pycontext.embedded_chat.tenant is 'The chat''s tenant.';
comment on column pycontext.embedded_chat.seq is 'Every message up to here is embedded.';
comment on column pycontext.embedded_chat.flushed_seq is 'The chat''s flushed_seq when its facts were embedded last.';
comment on column pycontext.embedded_chat.embedded_at is 'When that was.';
comment on table pycontext.embedding is 'Embeddings of facts, and of past messages part by part; what recall looks up by meaning.';
comment on column pycontext.embedding.chat_id is 'The chat.';
comment on column pycontext.embedding.seq is 'The message, or the one that the fact cites.';
comment on column pycontext.embedding.fact_id is 'The fact; empty for a message.';
comment on column pycontext.embedding.part_no is 'Which part of the message, from 0.';
comment on column pycontext.embedding.tenant is 'The chat''s tenant.';
comment on column pycontext.embedding.owner is 'The chat''s owner; null = its own chat alone recalls it.';
comment on column pycontext.embedding.message_id is 'The message; null for a fact.';
comment on column pycontext.embedding.is_user is 'True where a user''s message is embedded.';
comment on column pycontext.embedding.from_char is 'Where the part begins in the message''s readable text, from 1.';
comment on column pycontext.embedding.stated_at is 'When it was said.';
comment on column pycontext.embedding.embedding is 'What the model made of it.';

create or replace view pycontext.unembedded_row as
select
    null::bigint as seq, null::text as fact_id, null::integer as part_no, null::integer as from_char, null::text as text
where false;
comment on view pycontext.unembedded_row is 'Row type of unembedded.';
comment on column pycontext.unembedded_row.seq is 'The message, or the one that the fact cites.';
comment on column pycontext.unembedded_row.fact_id is 'The fact; empty for a message.';
comment on column pycontext.unembedded_row.part_no is 'Which part of the message, from 0.';
comment on column pycontext.unembedded_row.from_char is 'Where the part begins, from 1.';
comment on column pycontext.unembedded_row.text is 'What to embed, masked.';

create or replace view pycontext.chats_unembedded with (security_invoker = true) as
select c.chat_id
from pycontext.chat c
left join pycontext.embedded_chat w on w.chat_id = c.chat_id
where c.source is null and (w.chat_id is null and c.last_seq > 0 or c.last_seq > w.seq
    or c.flushed_seq is distinct from w.flushed_seq or exists (
        select from pycontext.fact f
        where f.chat_id = c.chat_id and f.source = 'remember' and f.gone_at is null and f.created_at > w.embedded_at));
comment on view pycontext.chats_unembedded is 'Chats with messages or facts that are not embedded yet. Adopted chats are not looked at.';
comment on column pycontext.chats_unembedded.chat_id is 'The chat.';

-- A text in parts that an embedding model reads whole: about 1,000 characters, 400 where words are not set apart; broken
-- at a line, else at a space. The first 50,000 characters.
create or replace function pycontext._parts(body text)
returns table (part_no integer, from_char integer, part text)
language plpgsql immutable strict
set search_path = pg_catalog, pg_temp
as $$
declare
    v_text text := left(body, 50000);
    v_cut integer;
begin
    from_char := 1;
    part_no := 0;
    while from_char <= length(v_text) loop
        part := substr(v_text, from_char, 1000);
        if length(regexp_replace(part, '[^\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]', '', 'g')) > 100 then
            part := left(part, 400);
        end if;
        if from_char + length(part) <= length(v_text) then
            v_cut := length(part) - coalesce(nullif(strpos(reverse(part), E'\n'), 0), 1000000) + 1;
            if v_cut <= length(part) / 2 then
                v_cut := length(part) - coalesce(nullif(strpos(reverse(part), ' '), 0), 1000000) + 1;
            end if;
            if v_cut > length(part) / 2 then
                part := left(part, v_cut);
            end if;
        end if;
        if part ~ '\w' then
            return next;
            part_no := part_no + 1;
        end if;
        from_char := from_char + length(part);
    end loop;
end
$$;

-- Messages of users and assistants that have no embedding yet, oldest first, nothing from before a reset.
create or replace function pycontext._unembedded_messages(c pycontext.chat, max_rows integer)
returns setof pycontext._thread_row
language sql stable
as $$
    select r.*
    from pycontext._thread_rows(c.chat_id, c.source,
        array[greatest(c.reset_seq, pycontext._origin(c.source), (
            select w.seq from pycontext.embedded_chat w where w.chat_id = c.chat_id)) + 1],
        array[4611686018427387904], null, null, false) r
    where r.role in ('user', 'assistant') and pycontext._own_text(r.content, r.role) ~ '\w'
        and r.content <> '"[redacted]"' and not exists (
        select from pycontext.embedding e where e.chat_id = c.chat_id and e.seq = r.seq and e.fact_id = '')
    order by r.seq
    limit max_rows
$$;

-- What of a chat is to be embedded: facts first, then at most max_rows messages, oldest first, in parts. PCX01.
create or replace function pycontext.unembedded(chat_id text, max_rows integer default 100)
returns setof pycontext.unembedded_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
begin
    select t.* into c from pycontext.chat t where t.chat_id = unembedded.chat_id;
    if not found then
        perform pycontext._chat_state(chat_id, null, null);
        return;
    end if;
    return query
    select f.seq, f.fact_id, 0, 1, f.content
    from pycontext.fact f
    where f.chat_id = c.chat_id and f.gone_at is null and not exists (
        select from pycontext.embedding e where e.chat_id = f.chat_id and e.seq = f.seq and e.fact_id = f.fact_id)
    order by f.seq, f.fact_id limit max_rows;
    return query
    select m.seq, ''::text, p.part_no, p.from_char, pycontext._mask(p.part)
    from pycontext._unembedded_messages(c, max_rows) m
    cross join lateral pycontext._parts(pycontext._own_text(m.content, m.role)) p
    order by m.seq, p.part_no;
end
$$;
comment on function pycontext.unembedded(text, integer) is
    'What of a chat has no embedding yet: facts and messages, these in parts, oldest first, at most max_rows of each; for '
    'cache_embeddings. Call again until it is empty. PCX01.';

-- Names the model that embeddings are of, and its dimension; the same again is harmless, another is PCX13.
create or replace function pycontext.use_embedding_model(model text, dimension integer)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    m pycontext.embedding_model;
begin
    perform pycontext._check_embedding_model(model, dimension);
    if exists (select from pycontext.embedding_model) then
        return;
    end if;
    perform pg_advisory_xact_lock(7234015113000001);
    if dimension is null or dimension not between 1 and 16000 or coalesce(model, '') = '' then
        perform pycontext._raise('PCX13', 'an embedding model has a name and a dimension of 1 to 16000',
            format('model is %L, dimension %s', model, coalesce(dimension::text, 'null')), 'pass what the model returned');
    end if;
    insert into pycontext.embedding_model (model, dimension) values (use_embedding_model.model, use_embedding_model.dimension)
    on conflict on constraint embedding_model_pk do nothing;
    -- what pgvector can index; beyond it every search is exact
    if dimension <= 2000 then
        execute format('create index embedding_ann_ix on pycontext.embedding using hnsw ((embedding::%1$s.vector(%2$s)) %1$s.vector_cosine_ops)',
            (select e.extnamespace::regnamespace from pg_catalog.pg_extension e where e.extname = 'vector'), dimension);
    end if;
end
$$;
comment on function pycontext.use_embedding_model(text, integer) is
    'Name the one model whose embeddings are kept, and its dimension, once; the same again is harmless. PCX13 for another.';

create or replace function pycontext._check_embedding_model(model text, dimension integer)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    m pycontext.embedding_model;
begin
    select t.* into m from pycontext.embedding_model t;
    if found and (m.model <> coalesce(_check_embedding_model.model, m.model)
        or m.dimension is distinct from _check_embedding_model.dimension) then
        perform pycontext._raise('PCX13', 'embeddings of another model or dimension are kept',
            format('kept: %s, %s numbers; given: %s, %s', m.model, m.dimension, coalesce(model, 'a query'), dimension),
            'use that model for messages and queries; the header of sql/extras/embeddings.sql says how to change it');
    end if;
end
$$;

-- Stores embeddings: [{"seq", "fact_id", "part_no", "from_char", "embedding": […]}]; what is there, and what is gone, is left
-- alone. All are checked before one is written. Returns how many were new. PCX01, PCX02, PCX13.
create or replace function pycontext.cache_embeddings(chat_id text, model text, embeddings jsonb)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    v_count integer;
    v_dimension integer := (select t.dimension from pycontext.embedding_model t);
    x jsonb;
begin
    if jsonb_typeof(embeddings) is distinct from 'array' then
        perform pycontext._raise('PCX02', 'embeddings must be an array', coalesce(left(embeddings::text, 200), 'null'),
            'pass what unembedded returned, embedded: [{"seq": …, "fact_id": …, "part_no": …, "from_char": …, "embedding": […]}]');
    end if;
    for x in select e.value from jsonb_array_elements(embeddings) e loop
        if not pycontext._is_seq(x ->> 'seq') or coalesce(x ->> 'part_no', '0') !~ '^[0-9]{1,6}$'
            or coalesce(x ->> 'from_char', '1') !~ '^[0-9]{1,9}$' or jsonb_typeof(x -> 'embedding') is distinct from 'array'
            or jsonb_path_exists(x, '$.embedding[*] ? (@.type() != "number")') then
            perform pycontext._raise('PCX02', 'an embedding needs the seq it is of and an array of numbers', left(x::text, 200),
                'pass what unembedded returned, embedded');
        end if;
        perform pycontext._check_embedding_model(model, jsonb_array_length(x -> 'embedding'));
        if v_dimension is null or not jsonb_path_exists(x, '$.embedding[*] ? (@ != 0)') then
            perform pycontext._raise('PCX13', case when v_dimension is null then 'no embedding model is named yet'
                else 'an embedding of zeros has no direction' end, format('seq %s', x ->> 'seq'),
                'first: select pycontext.use_embedding_model(model, dimension)');
        end if;
    end loop;
    insert into pycontext.embedding (chat_id, seq, fact_id, part_no, tenant, owner, message_id, is_user, from_char, stated_at, embedding)
    select c.chat_id, g.seq, g.fact_id, g.part_no, c.tenant, c.owner, m.message_id, m.role = 'user' and g.fact_id = '', g.from_char,
        coalesce(f.stated_at, m.created_at), g.embedding
    from (
        select (e.value ->> 'seq')::bigint as seq, coalesce(e.value ->> 'fact_id', '') as fact_id,
            coalesce((e.value ->> 'part_no')::integer, 0) as part_no, coalesce((e.value ->> 'from_char')::integer, 1) as from_char,
            array(select v.value::real from jsonb_array_elements_text(e.value -> 'embedding') v) as embedding
        from jsonb_array_elements(embeddings) e) g
    left join pycontext.fact f on f.chat_id = c.chat_id and f.fact_id = g.fact_id and f.seq = g.seq and f.gone_at is null
    left join lateral pycontext._thread_rows(c.chat_id, c.source, array[g.seq], array[g.seq], null, 1, true) m on g.fact_id = ''
    where f.fact_id is not null or g.fact_id = '' and m.role in ('user', 'assistant') and pycontext._content_text(m.content) ~ '\w'
    order by g.seq, g.fact_id, g.part_no
    on conflict on constraint embedding_pk do nothing;
    get diagnostics v_count = row_count;
    insert into pycontext.embedded_chat as w (chat_id, tenant, seq, flushed_seq, embedded_at)
    select c.chat_id, c.tenant,
        coalesce((select m.seq - 1 from pycontext._unembedded_messages(c, 1) m), case when c.source is null then c.last_seq
            else (pycontext._chat_state(c.chat_id, null, null)).hi_seq end),
        case when exists (
            select from pycontext.fact f
            where f.chat_id = c.chat_id and f.gone_at is null and not exists (
                select from pycontext.embedding e where e.chat_id = f.chat_id and e.seq = f.seq and e.fact_id = f.fact_id))
            then -1 else c.flushed_seq end, clock_timestamp()
    on conflict on constraint embedded_chat_pk do update
    set seq = excluded.seq, flushed_seq = excluded.flushed_seq, embedded_at = excluded.embedded_at;
    return v_count;
end
$$;
comment on function pycontext.cache_embeddings(text, text, jsonb) is
    'Store what a model made of the rows of unembedded: [{"seq", "fact_id", "part_no", "from_char", "embedding"}]. All are '
    'checked before one is written: PCX13 where model or dimension are not those of use_embedding_model, PCX02 for another '
    'form. Returns how many were new. PCX01.';

-- The facts and messages nearest to a query's embedding, best part of each, best first: of the chat's (tenant, owner), or of
-- the chat alone. No message that the window shows, or from before its chat's reset. Never fewer than there are: where few
-- are in scope they are all compared; among many the index looks, and if it comes back short all are compared again. PCX13.
do $do$
begin
    execute pg_catalog.format($function$
create or replace function pycontext._nearest(c pycontext.chat, shown bigint[], query real[], max_rows integer)
returns setof pycontext._recall_hit
language plpgsql stable
set search_path = pg_catalog, pg_temp
set hnsw.iterative_scan = 'relaxed_order'
set hnsw.ef_search = 200
set max_parallel_workers_per_gather = 0
as $$
declare
    v_scope text := case when c.owner is null then 'e.chat_id = $1' else 'e.tenant = $2 and e.owner = $3' end;
    v_nearest text;
    v_size bigint;
    v_found bigint;
begin
    perform pycontext._check_embedding_model(null, cardinality(query));
    execute 'select count(*) from (select from pycontext.embedding e where ' || v_scope || ' limit 5001) q'
    into v_size using c.chat_id, c.tenant, c.owner;
    if v_size = 0 then
        return;
    end if;
    v_nearest := 'with near as materialized (
            select e.*, %%s as distance
            from pycontext.embedding e
            where ' || v_scope || ' and (e.fact_id <> '''' or not (e.chat_id = $1 and e.seq = any ($4))
                and e.seq > (select k.reset_seq from pycontext.chat k where k.chat_id = e.chat_id))
            order by %%s limit $6
        ), best as (
            select distinct on (n.chat_id, n.seq, n.fact_id) n.* from near n order by n.chat_id, n.seq, n.fact_id, n.distance
        )
        select b.chat_id, b.seq, nullif(b.fact_id, ''''), b.is_user, b.stated_at, 1 - b.distance, b.from_char
        from best b
        where b.fact_id = '''' or exists (
            select from pycontext._facts($1, $2, $3) q
            where (q.fact).chat_id = b.chat_id and (q.fact).fact_id = b.fact_id and not q.is_superseded)
        order by b.distance, b.stated_at desc, b.seq desc';
    if v_size > 5000 and cardinality(query) <= 2000 then
        return query execute replace(v_nearest, '%%s', format('e.embedding::%1$s.vector(%%s) operator(%1$s.<=>) $5::%1$s.vector(%%s)',
            cardinality(query), cardinality(query)))
        using c.chat_id, c.tenant, c.owner, shown, query, max_rows;
        get diagnostics v_found = row_count;
        if v_found > 0 and v_found >= max_rows / 4 then
            return;
        end if;
    end if;
    -- + 0: no index answers that order
    return query execute replace(v_nearest, '%%s', '(e.embedding operator(%1$s.<=>) $5::%1$s.vector) + 0')
    using c.chat_id, c.tenant, c.owner, shown, query, max_rows;
end
$$
$function$, (select e.extnamespace::pg_catalog.regnamespace from pg_catalog.pg_extension e where e.extname = 'vector'));
end
$do$;

select pycontext._accept_ids();

revoke execute on all functions in schema pycontext from public;
