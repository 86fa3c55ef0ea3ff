-- What a summary lost: exact values of the messages it covers that nobody names any more.

create or replace view pycontext.lost_value_row as
select null::bigint as seq, null::text as message_id, null::text as role, null::text as kind, null::text as value
where false;
comment on view pycontext.lost_value_row is 'Row type of lost_values.';
comment on column pycontext.lost_value_row.seq is 'Newest covered message that holds the value; message_original(chat_id, seq) has it.';
comment on column pycontext.lost_value_row.message_id is 'That message.';
comment on column pycontext.lost_value_row.role is 'Who said it.';
comment on column pycontext.lost_value_row.kind is 'url, email, path, date, id or number.';
comment on column pycontext.lost_value_row.value is 'The value, to the letter.';

-- Exact values of a text, its first 20,000 characters: addresses, paths, dates, ids, numbers of two digits and more.
create or replace function pycontext._exact_values(body text)
returns table (kind text, value text)
language sql immutable parallel safe
as $$
    select case
            when v.value ~* '^[a-z][a-z0-9+]*://' then 'url'
            when v.value ~ '@' then 'email'
            when v.value ~ '^(\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}$)' or v.value ~* '^(\d{1,2}\s\w|[a-zа-я]+\s\d)|[年月]' then 'date'
            when v.value ~ '[/\\]' or v.value ~ '[[:alpha:]]\.[[:alpha:]]' then 'path'
            when v.value ~ '[[:alpha:]]' then 'id'
            else 'number' end, v.value
    from (
        select distinct rtrim(m.hit[1], '.,;:!?)]}''"-') as value
        from regexp_matches(left(body, 20000),
            '((?:https?|ftp|s3|gs|postgres(?:ql)?)://[^\s<>"''`）」。，、]+'
            '|[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+'
            '|\m[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\M'
            '|(?:~|\.{1,2}|\m[A-Za-z]:)?[/\\](?:[\w.@+-]+[/\\])*[\w.@+-]+|\m[\w.@+-]+(?:/[\w.@+-]+)+\.\w{1,8}\M'
            '|\m[\w-]+\.(?:py|js|ts|tsx|json|ya?ml|toml|md|txt|csv|xlsx?|docx?|pdf|html?|css|sql|sh|go|rs|java|log|xml|png|jpg|db|env)\M'
            '|\m\d{4}-\d{1,2}-\d{1,2}\M|\m\d{1,2}[./]\d{1,2}[./]\d{2,4}\M|(?:\d{4}年)?\d{1,2}月\d{1,2}[日号]'
            '|\m\d{1,2}(?:st|nd|rd|th)?\s(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|янв|фев|мар|апр|ма[йя]|июн|июл|авг|сен|окт|ноя|дек)[a-zа-я]*'
            '|\m(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?\s\d{1,2}\M'
            '|\m[A-Za-z]+[-_]?[A-Za-z_-]*\d[\w-]*|\m\d+[-_]?[A-Za-z][\w-]*|\m\d+(?:[.,:]\d+)*)', 'gi') m (hit)) v
    where length(v.value) between 2 and 300 and v.value ~ '[[:alnum:]]'
$$;

-- The words by which a fact that names a value is found: its longest run with a digit, which stands the same in every
-- text; of a value without digits, what the parser of texts may have made of it; of others, such as 2.0.1, '': any fact may.
create or replace function pycontext._value_terms(value text)
returns text[]
language sql immutable parallel safe
as $$
    select case when value ~ '[0-9]' then array[coalesce((
        select r.run[1] from regexp_matches(replace(lower(value), 'ё', 'е'), '[a-zа-я0-9]*[0-9][a-zа-я0-9]*', 'g') r (run)
        where length(r.run[1]) between 2 and 100 order by length(r.run[1]) desc limit 1), '')]
    else (
        select array_agg(w.word) filter (where w.word !~ '^[[:alnum:]]+$')
            || (array_agg(w.word order by length(w.word) desc, w.word) filter (where w.word ~ '^[[:alnum:]]+$'))[1]
        from unnest(tsvector_to_array(pycontext._words(value)
            || pycontext._words(translate(value, './\_-@:?=&', '          ')))) w (word)) end
$$;

-- A text with the paths that it lists together, a/{b, c}, told one by one below it.
create or replace function pycontext._spelled_out(body text)
returns text
language sql immutable parallel safe
as $$
    select concat_ws(E'\n', body, (
        select string_agg(m.hit[1] || n.name, E'\n')
        from regexp_matches(body, '(\S*[/=])\{([^{}\n]+)\}', 'g') m (hit), regexp_split_to_table(m.hit[2], ', ') n (name)))
$$;

-- Exact values in the words of users and assistants and in arguments of calls, of the messages a line covers, that neither
-- the line, what stays in sight beside it nor a live fact names: of all of them, or (is_whole false) of those since the line
-- before it and of its text.
create or replace function pycontext._lost_values(l pycontext.message, is_whole boolean, max_rows integer)
returns setof pycontext.lost_value_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_mergejoin = off
as $$
declare
    c pycontext.chat;
    p pycontext.message;
    v_named text;
    v_values text[];
    v_from bigint[];
    v_to bigint[];
begin
    select t.* into c from pycontext.chat t where t.chat_id = l.chat_id;
    if not is_whole then
        p := pycontext._line_before(l.chat_id, l.seq);
    end if;
    v_from := array[coalesce(p.seq + 1, l.covers_from)];
    v_to := array[l.seq];
    if p.request_seq is not null then
        -- stood beside that line until now
        v_from := p.request_seq || v_from;
        v_to := p.request_seq || v_to;
    end if;
    -- what stands beside the line is named too
    select concat_ws(E'\n', pycontext._spelled_out(lower(l.content #>> '{}')), lower(string_agg(
        left(concat_ws(E'\n', pycontext._content_text(r.content), (
            select string_agg(e.value #>> '{function,arguments}', E'\n')
            from jsonb_array_elements(coalesce(r.tool_calls, '[]')) e)), 20000), E'\n')))
    into v_named
    from pycontext._thread_rows(c.chat_id, c.source, array_remove(array[l.head_from, l.request_seq], null),
        array_remove(array[l.head_to, l.request_seq], null)) r
    where r.role in ('user', 'assistant') and (r.unit_seq between l.head_from and l.head_to or r.seq = l.request_seq);
    v_values := array(select lower(v.value) from regexp_split_to_table(v_named, '\n') n (line), pycontext._exact_values(n.line) v);
    return query
    with body as (
        select r.seq, r.message_id, r.role, pycontext._mask(concat_ws(E'\n', pycontext._content_text(r.content), (
                select string_agg(e.value #>> '{function,arguments}', E'\n')
                from jsonb_array_elements(coalesce(r.tool_calls, '[]')) e))) as body
        from pycontext._thread_rows(c.chat_id, c.source, v_from, v_to) r
        where r.role in ('user', 'assistant') and r.seq <= l.seq and r.seq is distinct from l.request_seq
            and not coalesce(r.unit_seq between l.head_from and l.head_to, false)
        union all
        -- of what the line before told; it cites places, and these are no values
        select p.seq, p.message_id, p.role, regexp_replace(pycontext._spelled_out(p.content #>> '{}'), '#\d+', '', 'g')
        where p.origin = 'compaction'
    ), said as (
        select distinct on (lower(v.value)) b.seq, b.message_id, b.role, v.kind, v.value, lower(v.value) as plain
        from body b cross join lateral pycontext._exact_values(b.body) v
        order by lower(v.value), b.seq desc
    ), unnamed as materialized (
        select q.* from said q
        where q.plain <> all (v_values) and (length(q.plain) < 6 or strpos(v_named, q.plain) = 0)
    ), term as materialized (
        select u.plain, t.term from unnamed u cross join lateral unnest(pycontext._value_terms(u.plain)) t (term)
    ), told as materialized (
        -- by words: an owner may have any number of facts, and each is looked at once
        select t.plain, f.content
        from (
            select lower(x.content) as content, array_append(tsvector_to_array(x.words), '') as terms
            from pycontext.fact x
            where x.gone_at is null and (c.owner is null and x.chat_id = c.chat_id or x.tenant = c.tenant and x.owner = c.owner)
            offset 0) f
        cross join lateral unnest(f.terms) w (term)
        join term t on t.term = w.term and strpos(f.content, t.plain) > 0
    )
    select q.seq, q.message_id, q.role, q.kind, q.value
    from unnamed q
    where not exists (
        select from told t
        where t.plain = q.plain
            and (length(q.plain) > 5 or q.plain in (select lower(x.value) from pycontext._exact_values(t.content) x)))
    order by q.seq, q.value
    limit case when max_rows < 0 then 0 else max_rows end;
end
$$;

-- Exact values in the words of users and assistants and in arguments of calls, of all messages this line covers, those of
-- earlier lines too, that neither the line nor a live fact names: at most max_rows. PCX01, PCX02.
create or replace function pycontext.lost_values(chat_id text, summary_id text, max_rows integer default 1000)
returns setof pycontext.lost_value_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    l pycontext.message;
begin
    select t.* into l from pycontext.message t
    where t.chat_id = lost_values.chat_id and t.message_id = summary_id and t.origin = 'compaction';
    if not found then
        -- an adopted chat has no row of ours before its first line
        perform pycontext._chat_bounds(chat_id);
        perform pycontext._raise('PCX02', 'no such summary', format('summary_id is %L', summary_id),
            'see: select summary_id from pycontext.compaction_history');
    end if;
    return query select * from pycontext._lost_values(l, true, max_rows);
end
$$;
comment on function pycontext.lost_values(text, text, integer) is
    'Exact values (ids, numbers, dates, paths, addresses) of all the messages a line covers, those of earlier lines too, that '
    'neither the line, the first turn and the request that stay in sight beside it, nor a live fact names, each with the newest '
    'message that has it: at most max_rows. What tools printed is not looked at. PCX01, PCX02.';
