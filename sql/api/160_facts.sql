-- Durable facts: taken from messages before these are summarized, kept on purpose, looked up, forgotten.

-- What recall returns, facts and messages alike.
create or replace view pycontext.recall_row as
select
    null::text as kind, null::text as chat_id, null::bigint as seq, null::text as fact_id, null::text as message_id,
    null::text as role, null::text as subject, null::text as content, null::real as score, null::integer as tokens,
    null::timestamptz as stated_at, null::bigint as beside_seq, null::text as beside, null::jsonb as also
where false;
comment on view pycontext.recall_row is 'Row type of recall.';
comment on column pycontext.recall_row.kind is 'fact or message.';
comment on column pycontext.recall_row.chat_id is 'The chat it comes from.';
comment on column pycontext.recall_row.seq is 'The message, or the one that the fact cites.';
comment on column pycontext.recall_row.fact_id is 'The fact, for forget; null for a message.';
comment on column pycontext.recall_row.message_id is 'The message; null for a fact.';
comment on column pycontext.recall_row.role is 'Who said it.';
comment on column pycontext.recall_row.subject is 'What the fact is about; null for a message.';
comment on column pycontext.recall_row.content is 'The fact, or the passage of the message around what was looked for.';
comment on column pycontext.recall_row.score is
    'How well it fits the query, 0 to 1, to compare rows of one call: by words alone, 1 = a fact with all of them; null '
    'without a query.';
comment on column pycontext.recall_row.tokens is 'What content, beside and also take, in tokens, estimated on the safe side.';
comment on column pycontext.recall_row.stated_at is 'When it was said.';
comment on column pycontext.recall_row.beside_seq is
    'The message that answers this one, or that this one answers; null for a fact, and where the window shows it.';
comment on column pycontext.recall_row.beside is 'How that one begins.';
comment on column pycontext.recall_row.also is
    'Messages right before or after that fit the query too, in short, by place: [{"seq", "role", "content"}]; null for none.';

create or replace view pycontext.fact_row as
select
    null::text as chat_id, null::text as fact_id, null::bigint as seq, null::text as role, null::text as source,
    null::text as kind, null::text as subject, null::text as content, null::boolean as is_superseded,
    null::timestamptz as stated_at, null::timestamptz as created_at
where false;
comment on view pycontext.fact_row is 'Row type of remember, flush_facts and memory_page.';
comment on column pycontext.fact_row.chat_id is 'The chat it was stated in.';
comment on column pycontext.fact_row.fact_id is 'Its name in that chat, for forget.';
comment on column pycontext.fact_row.seq is 'The message it cites.';
comment on column pycontext.fact_row.role is 'Who said it.';
comment on column pycontext.fact_row.source is 'flush or remember.';
comment on column pycontext.fact_row.kind is 'What sort of fact.';
comment on column pycontext.fact_row.subject is 'What it is about; null = contradicts nothing.';
comment on column pycontext.fact_row.content is 'The fact.';
comment on column pycontext.fact_row.is_superseded is
    'True where a newer fact says the same, or something else about the subject: recall leaves it out.';
comment on column pycontext.fact_row.stated_at is 'When it was stated.';
comment on column pycontext.fact_row.created_at is 'When it was stored.';

create or replace view pycontext.flush_source_row as
select
    null::bigint as seq, null::text as message_id, null::text as role, null::boolean as is_user, null::text as text,
    null::jsonb as tool_calls, null::text as tool_call_id, null::text as name, null::integer as tokens,
    null::timestamptz as created_at, null::bigint as edit_no, null::text as flush_mode
where false;
comment on view pycontext.flush_source_row is 'Row type of flush_source: original messages of a chat.';
comment on column pycontext.flush_source_row.seq is 'Place; what a fact cites.';
comment on column pycontext.flush_source_row.message_id is 'The message.';
comment on column pycontext.flush_source_row.role is 'user, assistant, tool, system or developer.';
comment on column pycontext.flush_source_row.is_user is 'True where the user himself wrote it: role user, and not injected.';
comment on column pycontext.flush_source_row.text is 'Its readable text, not masked.';
comment on column pycontext.flush_source_row.tool_calls is 'Calls of an assistant message.';
comment on column pycontext.flush_source_row.tool_call_id is 'The call a result answers.';
comment on column pycontext.flush_source_row.name is 'Name of the speaker or tool.';
comment on column pycontext.flush_source_row.tokens is 'What it takes, in tokens.';
comment on column pycontext.flush_source_row.created_at is 'When it was written.';
comment on column pycontext.flush_source_row.edit_no is 'The chat''s edit_no, to be handed to flush_facts.';
comment on column pycontext.flush_source_row.flush_mode is 'The profile''s: required or optional.';

-- Words, language by language and beyond. What is indexed depends on _words, _message_words and _content_text: a
-- release that changes one of them drops message_words_ix, so that it is built anew.

-- The words of a text of any size and script: stems of Russian and English (one configuration has both), every run with
-- a digit, pairs of characters where words are not set apart (Chinese, Japanese, Korean, Thai). Never fails: the first
-- 50,000 characters stay under what a tsvector can hold.
create or replace function pycontext._words(body text)
returns tsvector
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_wide constant text := '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f]+';
    v_text text := left(body, 50000);
    v_more text[] := '{}';
    v_words tsvector;
begin
    if v_text ~ '[^\u0001-\u007f]' then
        v_text := lower(normalize(v_text, nfkc));
        if v_text ~ '[\u0401-\u042f\u0490]' then
            -- lower() follows the locale, which may be C
            v_text := translate(v_text, 'АБВГДЕЁЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯЄІЇҐЎ', 'абвгдеёжзийклмнопрстуфхцчшщъыьэюяєіїґў');
        end if;
        v_text := replace(v_text, 'ё', 'е');
    else
        v_text := lower(v_text);
    end if;
    if v_text ~ v_wide then
        -- pairs, and the last character of a run alone, so that a prefix finds every single one
        select array_agg(distinct q.pair) into v_more
        from (
            select c.letter || coalesce(lead(c.letter) over (partition by r.n order by c.n), '') as pair
            from regexp_matches(v_text, v_wide, 'g') with ordinality r (run, n)
            cross join lateral string_to_table(r.run[1], null) with ordinality c (letter, n)) q;
        v_text := regexp_replace(v_text, v_wide, ' ', 'g');
    end if;
    if v_text ~ '[0-9]' then
        select v_more || coalesce(array_agg(distinct r.run[1]), '{}') into v_more
        from regexp_matches(v_text, '[a-zа-я0-9]*[0-9][a-zа-я0-9]*', 'g') r (run)
        where length(r.run[1]) between 2 and 100;
    end if;
    v_words := strip(to_tsvector('pg_catalog.russian', regexp_replace(v_text, '\S{200,}', ' ', 'g')));
    if v_text ~ '[/_\\@]' then
        -- the parts of paths, names and addresses, which the parser keeps whole
        select v_words || strip(to_tsvector('pg_catalog.russian', string_agg(translate(r.run[1], '/_\@.-:', '       '), ' ')))
        into v_words
        from regexp_matches(v_text, '[^\s/_\\@]*[/_\\@]\S{0,200}', 'g') r (run);
    end if;
    return case when v_more = '{}' then v_words else v_words || array_to_tsvector(v_more) end;
end
$$;
alter function pycontext._words(text) cost 2000;

-- A chat as a word, so that one index look-up finds the words of some chats alone.
create or replace function pycontext._chat_word(chat_id text)
returns text
language sql immutable strict parallel safe
as $$
    select 'chat:' || encode(substring(sha256(convert_to(chat_id, 'UTF8')) from 1 for 8), 'hex')
$$;

create or replace function pycontext._message_words(chat_id text, content jsonb)
returns tsvector
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(pycontext._words(pycontext._content_text(content)), '')
        || array_to_tsvector(array[pycontext._chat_word(chat_id)]);
end
$$;
-- no plan without the index is worth a thought, also before the first analyze
alter function pycontext._message_words(text, jsonb) cost 100000;

do $$
begin
    if pg_catalog.to_regclass('pycontext.message_words_ix') is null then
        create index message_words_ix on pycontext.message using gin (pycontext._message_words(chat_id, content))
        where kind = 'message' and coalesce(gone_act, 0) = 0 and role in ('user', 'assistant');
    end if;
end
$$;

-- The words of a query as terms of a tsquery, at most 32, the longest; a single Chinese character finds every pair it begins.
create or replace function pycontext._query_terms(query text)
returns text[]
language sql immutable parallel safe
as $$
    with word as (
        select w.word, length(w.word) = 1 and w.word ~ '[^\u0001-\u052f]' as is_single
        from unnest(tsvector_to_array(pycontext._words(left(query, 4000)))) w (word)
    ), chosen as (
        select v.word, v.is_single from word v
        where not (v.is_single and exists (select from word x where not x.is_single and right(x.word, 1) = v.word))
        order by length(v.word) desc, v.word limit 32
    )
    select coalesce(array_agg('''' || replace(replace(c.word, '\', '\\'), '''', '''''') || ''''
        || case when c.is_single then ':*' else '' end order by c.word), '{}')
    from chosen c
$$;

-- Keys by their shape, passwords in URLs and beside their names: the last guard; whoever calls a model masks before it.
create or replace function pycontext._mask(body text)
returns text
language sql immutable strict parallel safe
as $$
    select regexp_replace(regexp_replace(regexp_replace(body,
        '\m(?:sk-[A-Za-z0-9_-]{8,}|[srp]k_(?:live|test)_[A-Za-z0-9]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,20}|gh[pousr]_[A-Za-z0-9]{16,}'
        '|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{8,}|AIza[\w-]{30,}|hf_\w{16,}|npm_\w{16,}'
        '|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?)|-----BEGIN [A-Z ]*PRIVATE KEY-----.*', '[masked]', 'g'),
        '(://[^\s/:@]{0,200}:)[^\s/]{1,250}@', '\1[masked]@', 'g'),
        '((?:passw(?:or)?d|passphrase|secret|api[_-]?key|access[_-]?key|(?:auth|access|refresh)[_-]?token|пароль(?:\s(?:от|для|к)\s\S{1,40})?'
        '|токен|секретный\sключ|ключ\sapi|(?:api|апи)[\s-]?ключ|密码|パスワード)'
        '["'']?\s*(?:=|:|：|=>|\mis\M|—|是)\s*["'']?)(?!\[masked)[^\s"'',;，。]{3,}', '\1[masked]', 'gi')
$$;

-- The same of every text in a value.
create or replace function pycontext._masked(value jsonb)
returns jsonb
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    return case jsonb_typeof(value)
        when 'string' then to_jsonb(pycontext._mask(value #>> '{}'))
        when 'array' then (
            select coalesce(jsonb_agg(pycontext._masked(e.item) order by e.n), '[]')
            from jsonb_array_elements(value) with ordinality e (item, n))
        when 'object' then (
            select coalesce(jsonb_object_agg(e.key, pycontext._masked(e.item)), '{}') from jsonb_each(value) e (key, item))
        else value end;
end
$$;

create or replace function pycontext._fact_digest(content text)
returns bytea
language sql immutable strict parallel safe
as $$
    select substring(sha256(convert_to(
        translate(lower(btrim(regexp_replace(content, '\s+', ' ', 'g'), ' .!')), 'АБВГДЕЁЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯё',
            'абвгдеежзийклмнопрстуфхцчшщъыьэюяе'), 'UTF8')) from 1 for 16)
$$;

-- Live facts of one scope: all chats of (tenant, owner), or one chat where there is no owner. A fact is superseded by a newer
-- one with the same content or about the same subject.
create or replace function pycontext._facts(chat_id text, tenant text, owner text)
returns table (
    fact pycontext.fact, is_superseded boolean)
language sql stable
as $$
    select f, f.content is null
        or row_number() over (partition by f.digest order by f.stated_at desc, f.seq desc, f.created_at desc, f.fact_id) > 1
        or f.subject is not null and row_number() over (
            partition by f.subject order by f.stated_at desc, f.seq desc, f.created_at desc, f.fact_id) > 1
    from pycontext.fact f
    where f.gone_at is null and case when _facts.owner is null then f.chat_id = _facts.chat_id
        else f.tenant = _facts.tenant and f.owner = _facts.owner end
$$;

comment on column pycontext.fact.body_hash is
    'Adopted chats: hash of the cited row''s content then; null = a native chat, or not known.';

-- The hash of what a product's row says now; null: there is none, or the chat is native. Of its content alone: a view that
-- is made anew with more columns tells the same facts.
create or replace function pycontext._row_hash(chat_id text, source text, seq bigint)
returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    k pycontext._source_batch;
begin
    if source is null then
        return null;
    end if;
    k := pycontext._fetch_source(pycontext._registered(source), chat_id, seq, seq, 1, 'newest');
    return case when k.rows is not null then hashtextextended(coalesce(k.rows[1].content::text, ''), 0) end;
end
$$;
comment on function pycontext._row_hash(text, text, bigint) is
    'Private. The hash of what a product''s row says now; null = there is none.';

-- Whether the row that a fact cites is still there, and reads as it did where the fact was taken from its text. A fact from
-- before hashes were kept has none.
create or replace function pycontext._is_founded(f pycontext.fact, source text)
returns boolean
language sql stable
as $$
    select source is null or f.source = 'remember' and f.body_hash is null or coalesce((
        select f.source = 'remember' or f.body_hash is null or f.body_hash = h
        from pycontext._row_hash(f.chat_id, _is_founded.source, f.seq) h), false)
$$;
comment on function pycontext._is_founded(pycontext.fact, text) is
    'Private. Whether the row that a fact of an adopted chat cites is there and reads as it did.';

create or replace function pycontext._fact_row(f pycontext.fact, is_superseded boolean)
returns pycontext.fact_row
language sql immutable
as $$
    select f.chat_id, f.fact_id, f.seq, f.role, f.source, f.kind, f.subject, f.content, is_superseded, f.stated_at, f.created_at
$$;

-- Checks and stores one fact under the chat's lock; the row that is there wins. Null where it was forgotten since it was said.
create or replace function pycontext._put_fact(
    c pycontext.chat, seq bigint, role text, source text, content text, subject text, kind text, said_at timestamptz, n bigint)
returns pycontext.fact
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    f pycontext.fact;
    v_body text := pycontext._escape_fences(pycontext._mask(btrim(regexp_replace(content, '\s+', ' ', 'g'))));
    v_gone bigint;
begin
    if coalesce(v_body, '') !~ '\w' then
        perform pycontext._raise('PCX02', 'a fact needs text', format('fact %s says %s', n, coalesce(quote_literal(left(content, 80)), 'null')),
            'pass what is to be kept, in a sentence');
    end if;
    if length(v_body) > 2000 or length(subject) > 200 or length(kind) > 60 then
        perform pycontext._raise('PCX02', 'a fact is too long', format('fact %s: %s characters, subject %s, kind %s', n,
            length(v_body), coalesce(length(subject), 0), coalesce(length(kind), 0)),
            'a fact may take 2000 characters, its subject 200, its kind 60');
    end if;
    f.chat_id := c.chat_id;
    f.tenant := c.tenant;
    f.owner := c.owner;
    f.seq := seq;
    f.role := role;
    f.source := source;
    f.kind := coalesce(nullif(btrim(kind), ''), 'fact');
    f.subject := lower(nullif(btrim(pycontext._escape_fences(pycontext._mask(subject))), ''));
    f.content := v_body;
    f.words := pycontext._words(concat_ws(' ', translate(f.subject, '._', '  '), v_body));
    f.digest := pycontext._fact_digest(v_body);
    f.created_at := clock_timestamp();
    f.body_hash := pycontext._row_hash(c.chat_id, c.source, seq);
    -- forgotten after it was said: in this chat by place, in the owner's others by time
    if f.source = 'flush' and f.seq <= c.flushed_seq or f.source = 'flush' and exists (
        select from pycontext.fact t
        where t.digest = f.digest and t.gone_by = 'forgotten' and (t.chat_id = f.chat_id and t.gone_seq >= f.seq
            or t.chat_id <> f.chat_id and t.tenant = f.tenant and t.owner = f.owner and t.gone_at >= said_at)) then
        return null;
    end if;
    select count(*) filter (where t.gone_at is not null) into v_gone
    from pycontext.fact t where t.chat_id = f.chat_id and t.seq = f.seq and t.digest = f.digest;
    f.fact_id := 'fact_' || encode(substring(sha256(convert_to(
        jsonb_build_array(f.chat_id, f.seq, encode(f.digest, 'hex'), v_gone)::text, 'UTF8')) from 1 for 12), 'hex');
    select greatest(said_at, max(t.stated_at)) into f.stated_at
    from pycontext.fact t
    where t.chat_id = f.chat_id and t.seq <= f.seq and t.gone_at is null and t.subject = f.subject;
    f.stated_at := coalesce(f.stated_at, said_at);
    insert into pycontext.fact values (f.*) on conflict on constraint fact_pk do nothing;
    select t.* into f from pycontext.fact t where t.chat_id = f.chat_id and t.fact_id = f.fact_id;
    return f;
end
$$;

-- Keeps a fact on purpose, citing the chat's newest message; the same fact once. PCX01, PCX02.
create or replace function pycontext.remember(
    chat_id text, content text, subject text default null, kind text default null)
returns pycontext.fact_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    f pycontext.fact;
    v_seq bigint := c.last_seq;
begin
    if c.source is not null then
        v_seq := (pycontext._chat_bounds(chat_id)).hi_seq;
    end if;
    select t.* into f
    from pycontext.fact t
    where t.chat_id = c.chat_id and t.gone_at is null and t.source = 'remember'
        and t.digest = pycontext._fact_digest(pycontext._escape_fences(pycontext._mask(btrim(regexp_replace(
            remember.content, '\s+', ' ', 'g')))))
        and t.subject is not distinct from lower(nullif(btrim(remember.subject), ''))
        and not exists (
            select from pycontext._facts(t.chat_id, t.tenant, t.owner) q
            where (q.fact).subject = t.subject and (q.fact).digest <> t.digest and (q.fact).stated_at > t.stated_at)
    order by t.seq desc limit 1;
    if not found then
        f := pycontext._put_fact(c, v_seq, 'agent', 'remember', content, subject, kind, clock_timestamp(), 1);
    end if;
    return pycontext._fact_row(f, false);
end
$$;
comment on function pycontext.remember(text, text, text, text) is
    'Keep a fact on purpose, for this chat and all chats of its owner. subject: what it is about, such as user.name; a '
    'newer fact about it supersedes it. The same fact is stored once. PCX01, PCX02.';

-- The messages whose facts have not been taken yet, up to message M, oldest first, at most max_rows: (flushed_seq, M], what a
-- reset set aside included. None where the profile says off.
create or replace function pycontext.flush_source(chat_id text, after_message_id text, max_rows integer default 500)
returns setof pycontext.flush_source_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state := pycontext._chat_bounds(chat_id);
    v_to bigint := pycontext._place_of(s, after_message_id);
    v_from bigint := coalesce((select c.flushed_seq from pycontext.chat c where c.chat_id = flush_source.chat_id),
        pycontext._origin(s.source));
    v_end bigint;
    v_mode text := (select p.flush_mode from pycontext.profile p where p.profile = s.profile);
begin
    if v_mode = 'off' then
        return;
    end if;
    while v_from < v_to loop
        -- by seq, in steps: rows that were set aside leave gaps
        v_end := case when s.source is null then least(v_to, v_from + greatest(max_rows, 1)) else v_to end;
        return query
        select r.seq, r.message_id, r.role, r.is_user, pycontext._content_text(r.content), r.tool_calls, r.tool_call_id,
            r.name, r.tokens, r.created_at, s.edit_no, v_mode
        from pycontext._thread_rows(flush_source.chat_id, s.source, array[v_from + 1], array[v_end], null,
            greatest(max_rows, 1), s.source is null) r
        order by r.seq;
        exit when found;
        v_from := v_end;
    end loop;
end
$$;
comment on function pycontext.flush_source(text, text, integer) is
    'The original messages that a flush up to message M has to read: (flushed_seq, M], oldest first, at most max_rows '
    '(call again after flush_facts). Empty where nothing is owed, or where the profile''s flush_mode is off. PCX01, PCX02.';

-- Stores the facts of the messages up to M and moves "flushed through" there, in one transaction: all of them or none.
-- facts: [{"seq", "content", "subject", "kind"}]. A retry, and facts of messages flushed before, change nothing. PCX02, PCX07.
create or replace function pycontext.flush_facts(
    chat_id text, after_message_id text, facts jsonb, edit_no bigint default null)
returns setof pycontext.fact_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    s pycontext._window_state;
    f pycontext.fact;
    x jsonb;
    n bigint;
    r pycontext._thread_row;
    v_to bigint;
    v_from bigint;
begin
    if edit_no is not null and edit_no <> c.edit_no then
        perform pycontext._raise('PCX07', 'stale: the chat was edited while its facts were taken',
            format('edit_no was %s, is %s', edit_no, c.edit_no), 'read again: select * from pycontext.flush_source(chat_id, …)');
    end if;
    s := pycontext._chat_bounds(chat_id);
    v_to := pycontext._place_of(s, after_message_id);
    v_from := coalesce(c.flushed_seq, pycontext._origin(c.source));
    if jsonb_typeof(facts) is distinct from 'array' or jsonb_array_length(facts) > 2000 then
        perform pycontext._raise('PCX02', 'facts must be an array of at most 2000',
            format('got %s', coalesce(left(facts::text, 200), 'null')), 'pass [{"seq": …, "content": …}], [] where there are none');
    end if;
    if v_from >= v_to then
        return;
    end if;
    for x, n in select e.value, e.ordinality from jsonb_array_elements(facts) with ordinality e loop
        if jsonb_typeof(x) <> 'object' or not pycontext._is_seq(x ->> 'seq')
            or jsonb_typeof(x -> 'content') is distinct from 'string'
            or coalesce(jsonb_typeof(x -> 'subject'), 'null') not in ('string', 'null')
            or coalesce(jsonb_typeof(x -> 'kind'), 'null') not in ('string', 'null') then
            perform pycontext._raise('PCX02', 'a fact needs the seq it cites and a text', format('fact %s: %s', n, left(x::text, 200)),
                'pass {"seq": 412, "content": "…", "subject": …, "kind": …}');
        end if;
        select q.* into r
        from pycontext._thread_rows(c.chat_id, c.source, array[(x ->> 'seq')::bigint], array[(x ->> 'seq')::bigint], null, 1, true) q;
        if r.seq is null or r.seq > v_to then
            perform pycontext._raise('PCX02', 'a fact cites a message outside the range',
                format('fact %s cites #%s, the range is #%s to #%s', n, x ->> 'seq', v_from + 1, v_to),
                'cite a message that flush_source returned');
        end if;
        f := pycontext._put_fact(c, r.seq, r.role, 'flush', x ->> 'content', x ->> 'subject', x ->> 'kind', r.created_at, n);
        -- what was flushed before stays as it is: the transaction that stored it came first
        if f.fact_id is not null then
            return next pycontext._fact_row(f, false);
        end if;
    end loop;
    update pycontext.chat t
    set flushed_seq = v_to, flush_error = null, flush_failed_at = null
    where t.chat_id = c.chat_id;
end
$$;
comment on function pycontext.flush_facts(text, text, jsonb, bigint) is
    'Store the facts of the messages up to M, [{"seq", "content", "subject", "kind"}], each citing its message, and note '
    'that the chat is flushed through M: all of them or none. Returns the stored ones. No message is written and nothing '
    'is compacted. edit_no: from flush_source; refused (PCX07) where the chat was edited since. PCX01, PCX02.';

-- Notes on the chat that a flush failed; the next success clears it. reason holds no content.
create or replace function pycontext.fail_flush(chat_id text, reason text)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
begin
    update pycontext.chat t
    set flush_error = left(coalesce(reason, 'no reason given'), 500), flush_failed_at = clock_timestamp()
    where t.chat_id = c.chat_id;
end
$$;
comment on function pycontext.fail_flush(text, text) is
    'Note on the chat that its flush failed, and why; flush_facts clears it, status() shows it. PCX01.';

-- The message up to which facts are owed: what a line covers, or a reset set aside, and no flush has read. Null = none.
create or replace function pycontext.flush_owed(chat_id text)
returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select (
        select r.message_id
        from pycontext._thread_rows(c.chat_id, c.source, array[coalesce(c.flushed_seq, pycontext._origin(c.source)) + 1],
            array[c.line_seq], null, 1, true) r)
    from pycontext.chat c
    join pycontext.profile p on p.profile = c.profile
    where c.chat_id = flush_owed.chat_id and p.flush_mode <> 'off'
        and c.line_seq > coalesce(c.flushed_seq, pycontext._origin(c.source))
$$;
comment on function pycontext.flush_owed(text) is
    'The message up to which a flush of this chat is owed (covered by a line, or set aside by a reset); null = none is.';

create or replace view pycontext.chats_unflushed with (security_invoker = true) as
select c.chat_id
from pycontext.chat c
join pycontext.profile p on p.profile = c.profile
where p.flush_mode <> 'off' and c.line_seq > coalesce(c.flushed_seq, pycontext._origin(c.source))
    and (c.flush_failed_at is null or c.flush_failed_at < statement_timestamp() - interval '5 minutes');
comment on view pycontext.chats_unflushed is
    'Chats whose flush is owed (flush_owed says up to where), but for those where one failed within five minutes: a worker''s.';
comment on column pycontext.chats_unflushed.chat_id is 'The chat.';

-- What recall weighs before it reads any text: a fact, or a message (fact_id null). from_char: where the part of the
-- message begins that fits; null = not known.
create or replace view pycontext._recall_hit as
select
    null::text as chat_id, null::bigint as seq, null::text as fact_id, null::boolean as is_user,
    null::timestamptz as stated_at, null::double precision as score, null::integer as from_char
where false;

-- Rows of the messages with one of the terms, in the chats given: index look-ups, at most max_rows a term, those of the
-- chats named first. Under row-level security Postgres looks nothing up by words before it has checked the policy: there
-- the chats are read.
create or replace function pycontext._term_hits(chats text[], terms text[], max_rows integer)
returns table (chat_id text, seq bigint, role text, tokens integer, created_at timestamptz, term integer)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_indexscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    -- for a frequent term the index compares each message with each of the chats: a few at a time
    v_at_once constant integer := 20;
    v_some text[];
    v_scopes tsquery[] := array(
        select string_agg('''' || pycontext._chat_word(w.id) || '''', '|' order by w.n)::tsquery
        from unnest(chats) with ordinality w (id, n)
        group by (w.n - 1) / v_at_once order by (w.n - 1) / v_at_once);
    v_is_bound boolean := row_security_active('pycontext.message');
    v_left integer;
    v_count integer;
begin
    for i in 1 .. cardinality(terms) loop
        if v_is_bound then
            return query
            select m.chat_id, m.seq, m.role, m.tokens, m.created_at, i
            from pycontext.message m
            where m.chat_id = any (chats) and m.line_no = 0 and m.gone_act is null and m.role in ('user', 'assistant')
                and pycontext._message_words(m.chat_id, m.content) @@ terms[i]::tsquery
            limit max_rows;
            continue;
        end if;
        v_left := max_rows;
        for j in 1 .. cardinality(v_scopes) loop
            v_some := chats[(j - 1) * v_at_once + 1 : j * v_at_once];
            -- conditions no other index answers: without statistics the planner would take one of them and read all
            return query
            select m.chat_id, m.seq, m.role, m.tokens, m.created_at, i
            from pycontext.message m
            where pycontext._message_words(m.chat_id, m.content) @@ (v_scopes[j] && terms[i]::tsquery)
                and m.chat_id || '' = any (v_some) and m.kind = 'message' and coalesce(m.gone_act, 0) = 0
                and m.role in ('user', 'assistant')
            limit v_left;
            get diagnostics v_count = row_count;
            v_left := v_left - v_count;
            exit when v_left <= 0;
        end loop;
    end loop;
end
$$;

-- Facts and messages with words of the query: BM25, a word counted once in a text, so that long texts don't win by
-- length; what a user said counts double. The root of the usual weight of a rare word: in a question those are as often the
-- words of asking ("walk me through", "summarize") as what is asked for. No message that the window shows, or from before its chat's reset.
create or replace function pycontext._recall_words(
    c pycontext.chat, chats text[], shown bigint[], terms text[], max_rows integer)
returns setof pycontext._recall_hit
language sql stable
as $$
    with hit as (
        select h.chat_id, h.seq, null::text as fact_id, h.role, h.tokens, h.created_at as stated_at, h.term
        from pycontext._term_hits(
            case when c.source is null then chats else array_remove(chats, c.chat_id) end, terms, 2000) h
        join pycontext.chat k on k.chat_id = h.chat_id
        where h.seq > k.reset_seq and not (h.chat_id = c.chat_id and h.seq = any (shown))
        union all
        -- a table of the product has no index of ours: its newest rows are read
        select r.chat_id, r.seq, null, r.role, r.tokens, r.created_at, t.n::integer
        from pycontext._thread_rows(c.chat_id, c.source, array[greatest(c.reset_seq, pycontext._origin(c.source)) + 1],
            array[4611686018427387904], null, 1000, true) r
        cross join lateral (select pycontext._words(pycontext._content_text(r.content)) as words offset 0) w
        cross join unnest(terms) with ordinality t (term, n)
        where c.source is not null and r.role in ('user', 'assistant') and r.seq <> all (shown) and w.words @@ t.term::tsquery
        union all
        -- what may be but a quote of its message counts less than what is about something, or was kept on purpose
        select (q.fact).chat_id, (q.fact).seq, (q.fact).fact_id,
            case when (q.fact).subject is null and (q.fact).source = 'flush' then 'quote' end, 0, (q.fact).stated_at, t.n::integer
        from pycontext._facts(c.chat_id, c.tenant, c.owner) q
        cross join unnest(terms) with ordinality t (term, n)
        where not q.is_superseded and (q.fact).words @@ t.term::tsquery
    ), size as (
        select sum(k.last_seq) as rows, greatest(sum(k.total_tokens) / greatest(sum(k.last_seq), 1), 20) as tokens
        from pycontext.chat k where k.chat_id = any (chats)
    ), found as (
        select h.term, count(*) as rows from hit h group by h.term
    ), weight as (
        select g.n as term, sqrt(ln(
            1 + (greatest(s.rows, f.rows, 1) - coalesce(f.rows, 0) + 0.5) / (coalesce(f.rows, 0) + 0.5))) as weight
        from generate_series(1, cardinality(terms)) g (n)
        cross join size s
        left join found f on f.term = g.n
    )
    select h.chat_id, h.seq, h.fact_id, coalesce(h.role = 'user', false), h.stated_at,
        sum(w.weight) / (select sum(z.weight) from weight z) * case
            when h.fact_id is not null then case when h.role = 'quote' then 0.7 else 1 end
            else 0.9 * 1.3 / (1.3 + 0.9 * h.tokens / s.tokens) * case when h.role = 'user' then 1 else 0.5 end end,
        null::integer
    from hit h
    join weight w on w.term = h.term
    cross join size s
    group by h.chat_id, h.seq, h.fact_id, h.role, h.tokens, h.stated_at, s.tokens
    order by 6 desc, h.stated_at desc, h.seq desc
    limit max_rows
$$;

-- The part of a text around the first of the words that is found in it, or from a place on; whole where it is short.
create or replace function pycontext._passage(body text, query text, max_length integer, from_char integer default null)
returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_at integer := from_char;
begin
    if length(body) <= max_length then
        return body;
    end if;
    if v_at is null then
        select min(strpos(lower(body), w.word)) - max_length / 4 into v_at
        from regexp_split_to_table(lower(query), '[^[:alnum:]]+') w (word)
        where length(w.word) > 2 and strpos(lower(body), w.word) > 0;
    end if;
    v_at := greatest(1, least(coalesce(v_at, 1), length(body) - max_length + 1));
    return case when v_at > 1 then '…' else '' end || substr(body, v_at, max_length)
        || case when v_at + max_length <= length(body) then '…' else '' end;
end
$$;

-- What a message says of its own: an assistant that repeats a block of ours said nothing by that.
create or replace function pycontext._own_text(content jsonb, role text)
returns text
language sql immutable parallel safe
as $$
    select case when role = 'assistant' and pycontext._has_fence(t.body) then regexp_replace(t.body,
        '(?:<(memory-context|chat-summary|turn-context|system-note)[^>]*>.*?(</\1>|$)){1,1}?', '', 'gi') else t.body end
    from (select pycontext._content_text(content) as body) t
$$;

-- How many characters of a text take about so many tokens.
create or replace function pycontext._length_of(body text, tokens integer)
returns integer
language sql immutable strict parallel safe
as $$
    select greatest(1, (tokens * 400.0 / greatest(pycontext.estimate_tokens(left(body, 400)), 1)
        * length(left(body, 400)) / 400.0)::integer)
$$;

-- The places of the chat's messages that its window shows whole.
create or replace function pycontext._shown(chat_id text)
returns bigint[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return array(
        select w.seq from pycontext.working_window(chat_id) w
        where w.kind = 'message' and w.section in ('head', 'request', 'pinned', 'tail') and not w.is_shortened);
exception when sqlstate 'PCX05' then
    -- no window fits: nothing is shown
    return '{}';
end
$$;

-- The message that answers one of a user's, or that an assistant's answers: nothing else stands between but tool results.
create or replace function pycontext._beside(
    chat_id text, source text, seq bigint, role text, out beside_seq bigint, out body text)
language sql stable
as $$
    select case when r.role <> _beside.role then r.seq end, pycontext._own_text(r.content, r.role)
    from pycontext._thread_rows(_beside.chat_id, _beside.source,
        array[case when _beside.role = 'user' then _beside.seq + 1 else _beside.seq - 20 end],
        array[case when _beside.role = 'user' then _beside.seq + 20 else _beside.seq - 1 end],
        null, 20, _beside.role <> 'user') r
    where r.role in ('user', 'assistant') and (r.role = 'user' or pycontext._own_text(r.content, r.role) ~ '\w')
    order by case when _beside.role = 'user' then r.seq else -r.seq end
    limit 1
$$;

-- Facts and past messages of the chat's (tenant, owner), or of the chat alone where it has none, that fit the query, best first:
-- at most max_rows, and max_tokens in all (null: the profile's memory_tokens). No query: the newest facts. PCX01, PCX13.
create or replace function pycontext.recall(
    chat_id text, query text default null, query_embedding real[] default null, max_rows integer default 10,
    max_tokens integer default null, embedding_model text default null)
returns setof pycontext.recall_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    s pycontext._window_state;
    h record;
    m pycontext._thread_row;
    f pycontext.fact;
    b record;
    r pycontext.recall_row;
    v_rows pycontext.recall_row[] := '{}';
    v_at integer;
    v_lo bigint[] := '{}';
    v_hi bigint[] := '{}';
    v_terms text[] := pycontext._query_terms(query);
    v_chats text[];
    v_shown bigint[];
    v_words pycontext._recall_hit[] := '{}';
    v_near pycontext._recall_hit[] := '{}';
    v_told text[] := '{}';
    v_texts text := '';
    v_source text;
    v_body text;
    v_share integer;
    v_left integer;
    v_rows_left integer := least(greatest(coalesce(max_rows, 10), 0), 1000);
    v_place integer := 0;
    v_most integer;
begin
    max_rows := v_rows_left;
    select t.* into c from pycontext.chat t where t.chat_id = recall.chat_id;
    if not found then
        -- an adopted chat of which nothing is derived yet, or none at all
        s := pycontext._chat_bounds(chat_id);
        c.chat_id := chat_id;
        c.tenant := pycontext._tenant(null);
        c.profile := s.profile;
        c.source := s.source;
        c.reset_seq := 0;
    end if;
    select coalesce(max_tokens, least(p.memory_tokens, p.context_window / 8)) into v_left
    from pycontext.profile p where p.profile = c.profile;
    v_most := greatest(v_left / greatest(max_rows, 1), 100);
    v_chats := array[c.chat_id] || case when c.owner is null then '{}' else array(
        select t.chat_id from pycontext.chat t
        where t.tenant = c.tenant and t.owner = c.owner and t.chat_id <> c.chat_id order by t.updated_at desc limit 500) end;
    if query_embedding is null and cardinality(v_terms) = 0 then
        if coalesce(query, '') !~ '\w' then
            v_words := array(
                select row((q.fact).chat_id, (q.fact).seq, (q.fact).fact_id, null, (q.fact).stated_at, null, null)::pycontext._recall_hit
                from pycontext._facts(c.chat_id, c.tenant, c.owner) q
                where not q.is_superseded
                order by (q.fact).stated_at desc, (q.fact).seq desc limit 4 * max_rows);
        end if;
    else
        v_shown := pycontext._shown(chat_id);
        if cardinality(v_terms) > 0 then
            v_words := array(select w from pycontext._recall_words(c, v_chats, v_shown, v_terms, 20 * max_rows) w);
        end if;
        if query_embedding is not null then
            if to_regclass('pycontext.embedding') is null then
                raise exception using errcode = '0A000', message = 'recall by embedding is not installed',
                    hint = 'run sql/extras/embeddings.sql, or leave query_embedding out: recall is lexical then';
            end if;
            perform pycontext._check_embedding_model(embedding_model, cardinality(query_embedding));
            if exists (select from unnest(query_embedding) x where x in ('NaN', 'Infinity', '-Infinity') is not false) then
                perform pycontext._raise('PCX13', 'an embedding is of numbers, all of them finite', left(query_embedding::text, 200),
                    'pass what the model returned');
            end if;
            v_near := array(select n from pycontext._nearest(c, v_shown, query_embedding, 20 * max_rows) n);
        end if;
    end if;
    for h in
        with w as (
            select u.*, row_number() over () as place from unnest(v_words) u
        ), n as (
            select u.*, row_number() over () as place,
                case when u.is_user then row_number() over (partition by u.is_user order by u.score desc) end as user_place
            from unnest(v_near) u
        )
        select coalesce(w.chat_id, n.chat_id) as chat_id, coalesce(w.seq, n.seq) as seq,
            coalesce(w.fact_id, n.fact_id) as fact_id, coalesce(w.stated_at, n.stated_at) as stated_at, n.from_char,
            case when cardinality(v_near) = 0 then w.score
                else (coalesce(61.0 / (60 + w.place), 0) + coalesce(61.0 / (60 + n.place), 0)
                    + coalesce(61.0 / (60 + n.user_place), 0)) / 3 end as score
        from w
        full join n on n.chat_id = w.chat_id and n.seq = w.seq and coalesce(n.fact_id, '') = coalesce(w.fact_id, '')
        order by 6 desc nulls last, 4 desc, 2 desc
    loop
        v_place := v_place + 1;
        exit when v_left < 10 or v_rows_left <= 0 and v_place > 4 * max_rows;
        r := null;
        v_share := case when v_rows_left > 0 then greatest(v_left / v_rows_left, 100) else least(greatest(v_left, 100), v_most) / 2 end;
        v_source := case when h.chat_id = c.chat_id then c.source
            else (select k.source from pycontext.chat k where k.chat_id = h.chat_id) end;
        if h.fact_id is not null then
            continue when v_rows_left = 0;
            select t.* into f from pycontext.fact t where t.chat_id = h.chat_id and t.fact_id = h.fact_id;
            -- a fact that only quotes what was just told
            continue when f.subject is null and f.source = 'flush' and strpos(v_texts, btrim(f.content, '…" ')) > 0;
            if v_source is not null then
                begin
                    continue when not pycontext._is_founded(f, v_source);
                exception when insufficient_privilege or sqlstate 'PCX12' then
                    continue;  -- another chat's, whose rows nobody can look at, or not who asks
                end;
            end if;
            r := row('fact', f.chat_id, f.seq, f.fact_id, null, f.role, f.subject, f.content, h.score,
                pycontext.estimate_tokens(f.content), f.stated_at, null, null, null)::pycontext.recall_row;
        else
            -- a question and its reply are told once, together
            continue when format('%s %s', h.chat_id, h.seq) = any (v_told);
            if v_rows_left = 0 then
                -- what tokens are left tell what was said right before or after a row's message, at half the length
                select w.n into v_at
                from generate_subscripts(v_rows, 1) w (n)
                where (v_rows[w.n]).kind = 'message' and (v_rows[w.n]).chat_id = h.chat_id
                    and h.seq between v_lo[w.n] - 2 and v_hi[w.n] + 2
                    and coalesce(jsonb_array_length((v_rows[w.n]).also), 0) < 4
                limit 1;
                continue when v_at is null;
            end if;
            select t.* into m
            from pycontext._thread_rows(h.chat_id, v_source, array[h.seq], array[h.seq], null, 1, true) t;
            continue when not found;
            v_body := pycontext._own_text(m.content, m.role);
            -- found by what it repeated
            continue when v_body is distinct from pycontext._content_text(m.content) and (v_body !~ '\w'
                or h.from_char is null and not pycontext._words(v_body) @@ array_to_string(v_terms, '|')::tsquery);
            r := row('message', m.chat_id, m.seq, null, m.message_id, m.role, null,
                pycontext._passage(v_body, query, least(800, pycontext._length_of(v_body, v_share * 5 / 8)), h.from_char),
                h.score, 0, m.created_at, null, null, null)::pycontext.recall_row;
            select q.* into b from pycontext._beside(h.chat_id, v_source, h.seq, m.role) q;
            if b.beside_seq is not null and not (h.chat_id = c.chat_id and b.beside_seq = any (v_shown))
                and format('%s %s', h.chat_id, b.beside_seq) <> all (v_told) then
                r.beside_seq := b.beside_seq;
                r.beside := pycontext._passage(b.body, '', least(400, pycontext._length_of(b.body, v_share / 4)), 1);
            end if;
            r.tokens := pycontext.estimate_tokens(r.content) + coalesce(pycontext.estimate_tokens(r.beside) + 4, 0);
            if r.tokens + 8 > v_left then
                r.tokens := pycontext.estimate_tokens(r.content);
                r.beside := null;
                r.beside_seq := null;
            end if;
        end if;
        continue when r.tokens + 8 > v_left;
        v_left := v_left - r.tokens - 8;
        if r.kind = 'message' then
            v_told := v_told || format('%s %s', r.chat_id, r.seq) || format('%s %s', r.chat_id, r.beside_seq);
            v_texts := concat_ws(E'\n', v_texts, regexp_replace(r.content, '\s+', ' ', 'g'));
        end if;
        if v_at is not null then
            v_rows[v_at].also := coalesce(v_rows[v_at].also, '[]')
                || jsonb_build_object('seq', r.seq, 'role', r.role, 'content', r.content)
                || case when r.beside_seq is null then '[]' else jsonb_build_array(jsonb_build_object('seq', r.beside_seq,
                    'role', case r.role when 'user' then 'assistant' else 'user' end, 'content', r.beside)) end;
            v_rows[v_at].tokens := v_rows[v_at].tokens + r.tokens + 4;
            v_lo[v_at] := least(v_lo[v_at], r.seq, r.beside_seq);
            v_hi[v_at] := greatest(v_hi[v_at], r.seq, r.beside_seq);
        else
            v_rows := v_rows || r;
            v_lo := v_lo || least(r.seq, r.beside_seq);
            v_hi := v_hi || greatest(r.seq, r.beside_seq);
            v_rows_left := v_rows_left - 1;
        end if;
    end loop;
    return query
    select w.kind, w.chat_id, w.seq, w.fact_id, w.message_id, w.role, w.subject, w.content, w.score, w.tokens, w.stated_at,
        w.beside_seq, w.beside, (
            select jsonb_agg(a.value order by (a.value ->> 'seq')::bigint) from jsonb_array_elements(w.also) a)
    from unnest(v_rows) w;
end
$$;
comment on function pycontext.recall(text, text, real[], integer, integer, text) is
    'Facts and past messages that fit the query, best first, of all chats of this chat''s tenant and owner (no owner: of '
    'this chat alone): at most max_rows (up to 1,000), within max_tokens (null: the profile''s memory_tokens). By words, in every script, '
    'and where query_embedding is given by meaning too, both fused by rank (that needs extras/embeddings.sql; '
    'embedding_model: what made it, PCX13 where that is not the model kept). A message '
    'comes with the reply to it, or what it replies to, in short; those right before or after it that fit too are told '
    'with it. What the chat''s window shows is left out, and what was '
    'said before a reset. Of facts that contradict each other the newest. No query: the newest facts. PCX01, PCX13.';

-- Forgets a fact by its id, or every fact with all the words of the query, in the chats of this chat's (tenant, owner); with it
-- go other tellings of it and older facts about its subject. The content is erased. Returns how many.
create or replace function pycontext.forget(chat_id text, fact_id text default null, query text default null)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat := pycontext._lock_chat(chat_id, false);
    v_terms text[] := pycontext._query_terms(query);
    v_count integer;
begin
    if (fact_id is null) = (query is null) or query is not null and cardinality(v_terms) = 0 then
        perform pycontext._raise('PCX02', 'forget takes the id of a fact, or a query with words',
            format('fact_id is %L, query is %L', fact_id, query), 'see: select * from pycontext.recall(chat_id, query)');
    end if;
    with live as materialized (
        select (q.fact).* from pycontext._facts(c.chat_id, c.tenant, c.owner) q
    ), named as (
        select l.* from live l
        where l.fact_id = forget.fact_id or query is not null and l.words @@ array_to_string(v_terms, '&')::tsquery
    ), doomed as (
        select l.chat_id, l.fact_id from live l
        where exists (select from named w where l.chat_id = w.chat_id and l.fact_id = w.fact_id or l.digest = w.digest
            or l.subject = w.subject and l.stated_at <= w.stated_at)
    )
    update pycontext.fact f
    set gone_at = clock_timestamp(), gone_by = 'forgotten', content = null, words = null, subject = null,
        gone_seq = case when k.source is null then k.last_seq else 4611686018427387904 end
    from doomed d join pycontext.chat k on k.chat_id = d.chat_id
    where f.chat_id = d.chat_id and f.fact_id = d.fact_id;
    get diagnostics v_count = row_count;
    perform pycontext._erase_embeddings(q.chat_id)
    from (
        select distinct f.chat_id from pycontext.fact f
        where f.gone_by = 'forgotten' and (f.chat_id = c.chat_id or f.tenant = c.tenant and f.owner = c.owner)) q;
    return v_count;
end
$$;
comment on function pycontext.forget(text, text, text) is
    'Forget a fact by its id, or all facts with every word of the query, in this chat and the others of its owner: the content '
    'is erased, other tellings and older facts about the subject with it. A later flush does not bring it back; saying it '
    'again does. Messages stay: redact_message erases those. Returns how many were forgotten. PCX01, PCX02.';

-- What is remembered of an owner, newest first, superseded facts too: the page to show him. chat_id: of that chat alone.
create or replace function pycontext.memory_page(
    owner text, tenant text default null, chat_id text default null, before timestamptz default null,
    max_rows integer default 100)
returns setof pycontext.fact_row
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select (p.fact).chat_id, (p.fact).fact_id, (p.fact).seq, (p.fact).role, (p.fact).source, (p.fact).kind, (p.fact).subject,
        (p.fact).content, p.is_superseded, (p.fact).stated_at, (p.fact).created_at
    from pycontext._facts(memory_page.chat_id, pycontext._tenant(memory_page.tenant), memory_page.owner) p
    where (memory_page.chat_id is null or (p.fact).chat_id = memory_page.chat_id)
        and (before is null or (p.fact).stated_at < before)
    order by (p.fact).stated_at desc, (p.fact).seq desc, (p.fact).fact_id
    limit case when max_rows < 0 then 0 else max_rows end
$$;
comment on function pycontext.memory_page(text, text, text, timestamptz, integer) is
    'What is remembered of an owner (null: of the chat given), newest first, at most max_rows before a time: the page to show '
    'him. is_superseded marks what recall leaves out. tenant: null = the session''s.';

-- For acts, which hold the chat's lock.

-- Erases the embeddings of the messages in a range of places and of the facts that cite them, and those of facts that are
-- gone. The extra may not be installed.
create or replace function pycontext._erase_embeddings(
    chat_id text, from_seq bigint default null, to_seq bigint default null)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass('pycontext.embedding') is null then
        return;
    end if;
    delete from pycontext.embedding e
    where e.chat_id = _erase_embeddings.chat_id and (
        e.seq between from_seq and to_seq or e.fact_id <> '' and not exists (
            select from pycontext.fact f where f.chat_id = e.chat_id and f.fact_id = e.fact_id and f.gone_at is null));
    update pycontext.embedded_chat w
    set seq = least(w.seq, from_seq - 1)
    where w.chat_id = _erase_embeddings.chat_id and w.seq >= from_seq;
end
$$;

-- After a rewind to a seq: facts from messages after it leave recall, and their place is owed to the flush again.
create or replace function pycontext._rewind_facts(chat_id text, seq bigint)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer;
begin
    update pycontext.fact f
    set gone_at = clock_timestamp(), gone_by = 'rewound'
    where f.chat_id = _rewind_facts.chat_id and f.seq > _rewind_facts.seq and f.gone_at is null;
    get diagnostics v_count = row_count;
    perform pycontext._erase_embeddings(chat_id, seq + 1, 9223372036854775807);
    update pycontext.chat c
    set flushed_seq = _rewind_facts.seq
    where c.chat_id = _rewind_facts.chat_id and c.flushed_seq > _rewind_facts.seq;
    return v_count;
end
$$;

-- After a redaction: every fact that cites the message is deleted, whatever became of it.
create or replace function pycontext._erase_facts(chat_id text, seq bigint)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer;
begin
    delete from pycontext.fact f where f.chat_id = _erase_facts.chat_id and f.seq = _erase_facts.seq;
    get diagnostics v_count = row_count;
    perform pycontext._erase_embeddings(chat_id, seq, seq);
    return v_count;
end
$$;

-- Facts of an adopted chat that cite a row which is gone, or reads otherwise now, are deleted. What was forgotten has no
-- content, and stays forgotten.
create or replace function pycontext._erase_unfounded(c pycontext.chat)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer;
begin
    delete from pycontext.fact f
    where f.chat_id = c.chat_id and f.content is not null and not pycontext._is_founded(f, c.source);
    get diagnostics v_count = row_count;
    if v_count > 0 then
        perform pycontext._erase_embeddings(c.chat_id);
    end if;
    return v_count;
end
$$;
comment on function pycontext._erase_unfounded(pycontext.chat) is
    'Private. Deletes facts of an adopted chat whose row is gone or reads otherwise.';

-- A fork knows what its part of the chat knew. The owner sees each fact once all the same.
create or replace function pycontext._fork_facts(chat_id text, fork_id text, seq bigint)
returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer;
begin
    insert into pycontext.fact (chat_id, fact_id, tenant, owner, seq, role, source, kind, subject, content, words, digest,
        stated_at, created_at)
    select k.chat_id, f.fact_id, k.tenant, k.owner, f.seq, f.role, f.source, f.kind, f.subject, f.content, f.words, f.digest,
        f.stated_at, f.created_at
    from pycontext.fact f
    join pycontext.chat k on k.chat_id = fork_id
    where f.chat_id = _fork_facts.chat_id and f.seq <= _fork_facts.seq and f.gone_at is null
    on conflict on constraint fact_pk do nothing;
    get diagnostics v_count = row_count;
    update pycontext.chat k
    set flushed_seq = (
        select least(c.flushed_seq, _fork_facts.seq) from pycontext.chat c where c.chat_id = _fork_facts.chat_id)
    where k.chat_id = fork_id;
    return v_count;
end
$$;

-- What recall finds for a request, as text: a paragraph a row, with its day and where it stands. Twin of memory_text.
create or replace function pycontext._memory_text(chat_id text, query text, query_embedding real[], embedding_model text)
returns text
language sql stable
as $$
    select string_agg(case when r.kind = 'fact' then format('[%s] %s', p.place, r.content) else q.said end,
        E'\n\n' order by r.ordinality)
    from pycontext.recall(chat_id, query, query_embedding, embedding_model => embedding_model) with ordinality r
    cross join lateral (select format('%s #%s', to_char(r.stated_at, 'YYYY-MM-DD'), r.seq) as place) p
    cross join lateral (
        select string_agg(format('[%s %s] %s', t.place, t.role, t.content), E'\n' order by t.seq) as said
        from (
            select r.seq, p.place, r.role, r.content
            union all
            select r.beside_seq, '#' || r.beside_seq, case r.role when 'user' then 'assistant' else 'user' end, r.beside
            where r.beside_seq is not null
            union all
            select (a.value ->> 'seq')::bigint, '#' || (a.value ->> 'seq'), a.value ->> 'role', a.value ->> 'content'
            from jsonb_array_elements(r.also) a) t) q
$$;

comment on function pycontext._memory_text(text, text, real[], text) is
    'Private. What recall finds for a query, as text for a memory block.';
