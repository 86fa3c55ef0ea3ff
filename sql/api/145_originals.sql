-- What the window leaves out or shortens, by its #seq and by its words.

create or replace view pycontext.found_row as
select
    null::bigint as seq, null::text as message_id, null::text as role, null::text as preview, null::integer as tokens,
    null::timestamptz as created_at
where false;
comment on view pycontext.found_row is 'Row type of search_thread.';
comment on column pycontext.found_row.seq is 'Place of the message; message_original(chat_id, seq) has all of it.';
comment on column pycontext.found_row.message_id is 'The message''s own id.';
comment on column pycontext.found_row.role is 'Who said it.';
comment on column pycontext.found_row.preview is 'The text around the first word that was found, in one line.';
comment on column pycontext.found_row.tokens is 'What the whole message takes.';
comment on column pycontext.found_row.created_at is 'When it was written.';

-- The newest reset's place, below every message where there is none.
create or replace function pycontext._reset_of(chat_id text)
returns bigint
language sql stable
as $$
    select coalesce(max(m.seq), -4611686018427387904) from pycontext.message m
    where m.chat_id = _reset_of.chat_id and m.line_no > 0 and m.origin = 'reset' and m.gone_act is null
$$;

-- The message at #seq as it was stored, and after it the lines that stand there. for_model: nothing from before the
-- place where the user started over. No row where there is none. PCX01.
create or replace function pycontext.message_original(chat_id text, seq bigint, for_model boolean default false)
returns setof pycontext.thread_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_source text := pycontext._source_of(chat_id);
    v_after bigint := case when for_model then pycontext._reset_of(chat_id) else -4611686018427387904 end;
begin
    return query
    select r.seq, r.message_id, r.kind, r.origin, r.role, r.content, r.tool_calls, r.tool_call_id, r.name, r.tokens,
        r.encoding is null, r.created_at, r.metadata, r.summary
    from (
        select t.* from pycontext._thread_rows(message_original.chat_id, v_source, array[message_original.seq],
            array[message_original.seq], null, 1, true) t
        where t.seq > v_after
        union all
        select t.* from pycontext._lines(message_original.chat_id, message_original.seq, message_original.seq) t
        where t.seq > v_after or t.origin = 'reset') r
    order by r.line_no;
end
$$;
comment on function pycontext.message_original(text, bigint, boolean) is
    'The message at #seq as it was stored, whole, and after it the lines that stand there. for_model: nothing from before '
    'the newest reset. No row where the thread has none.';

-- One form for letters that differ in case only, in any locale: Latin, Cyrillic, Greek.
create or replace function pycontext._folded(body text)
returns text
language sql immutable parallel safe
as $$
    select case when octet_length(body) = length(body) then lower(body)
        else translate(lower(body),
            'АБВГДЕЁЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯЁёІЇЄҐЎΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩςÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞŒŠŽŁ',
            'абвгдеежзийклмнопрстуфхцчшщъыьэюяееіїєґўαβγδεζηθικλμνξοπρστυφχψωσàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþœšžł')
    end
$$;

-- What search looks at: the readable text, then names and arguments of calls.
create or replace function pycontext._searched_text(content jsonb, tool_calls jsonb)
returns text
language sql immutable parallel safe
as $$
    select concat_ws(E'\n', pycontext._content_text(content), (
        select string_agg(concat_ws(' ', e.value #>> '{function,name}', e.value #>> '{function,arguments}'), E'\n'
            order by e.ordinality)
        from jsonb_array_elements(case jsonb_typeof(tool_calls) when 'array' then tool_calls else '[]' end)
            with ordinality e))
$$;

-- Messages of one chat that hold every word of the query, in any case and script, newest first. Words are what blanks
-- part; each is found inside words too. Looks at 100,000 rows at most: go on with before_seq. PCX01, PCX02.
create or replace function pycontext.search_thread(
    chat_id text, query text, max_rows integer default 20, before_seq bigint default null, for_model boolean default false)
returns setof pycontext.found_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set max_parallel_workers_per_gather = 0
as $$
declare
    v_source text := pycontext._source_of(chat_id);
    v_words text[];
    v_from bigint := pycontext._origin(v_source);
    v_to bigint := coalesce(before_seq - 1, 4611686018427387904);
    v_left integer := least(greatest(coalesce(max_rows, 20), 0), 200);
    v_batch integer := 100;
    v_looked integer := 0;
    v_seq bigint;
    b record;
begin
    select array_agg(distinct w.word) into v_words
    from regexp_split_to_table(pycontext._folded(replace(query, U&'\3000', ' ')), '\s+') w (word)
    where w.word <> '';
    if v_words is null then
        perform pycontext._raise('PCX02', 'a search needs words', format('query is %L', query), 'pass one word or more');
    end if;
    if for_model then
        v_from := greatest(v_from, pycontext._reset_of(chat_id) + 1);
    end if;
    while v_left > 0 and v_looked < 100000 and v_from <= v_to loop
        select min(r.seq) as seq, count(*) as rows, array_agg(r.seq order by r.seq desc) filter (where r.is_found) as found
        into b
        from (
            select t.seq, (
                select bool_and(strpos(x.folded, w.word) > 0) from unnest(v_words) w (word)) as is_found
            from pycontext._thread_rows(search_thread.chat_id, v_source, array[v_from], array[v_to], null, v_batch, true) t
            cross join lateral (
                select pycontext._folded(pycontext._searched_text(t.content, t.tool_calls)) as folded offset 0) x) r;
        foreach v_seq in array coalesce(b.found[:v_left], '{}') loop
            return query
            select t.seq, t.message_id, t.role, pycontext._around(x.body, (
                    select min(strpos(pycontext._folded(x.body), w.word)) from unnest(v_words) w (word))),
                t.tokens, t.created_at
            from pycontext._thread_rows(search_thread.chat_id, v_source, array[v_seq], array[v_seq], null, 1, true) t
            cross join lateral (select pycontext._searched_text(t.content, t.tool_calls) as body) x;
        end loop;
        v_left := v_left - coalesce(cardinality(b.found), 0);
        exit when b.rows < v_batch;
        v_looked := v_looked + v_batch;
        v_to := b.seq - 1;
        v_batch := least(v_batch * 2, 2000);
    end loop;
end
$$;
comment on function pycontext.search_thread(text, text, integer, bigint, boolean) is
    'Messages of one chat that hold every word of the query, in any case and script, newest first, at most 200. Looks at '
    '100,000 rows at most: go on with before_seq. for_model: nothing from before the newest reset.';

-- A text around a place, in one line.
create or replace function pycontext._around(body text, place integer)
returns text
language sql immutable parallel safe
as $$
    select case when place > 61 then '…' else '' end
        || btrim(regexp_replace(substr(body, greatest(place - 60, 1), 180), '\s+', ' ', 'g'))
        || case when length(body) > greatest(place - 60, 1) + 179 then '…' else '' end
$$;
