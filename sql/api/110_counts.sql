-- Rows of a chat that no tokenizer has counted, newest first, as the texts to count: tokens of a row = overhead +
-- the sum over texts; of an adopted chat those that its windows read. encoding null: the chat's own.
create or replace function pycontext.uncounted_messages(
    chat_id text, encoding text default null, max_rows integer default 1000)
returns setof pycontext.uncounted_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    p pycontext.profile;
    v_encoding text;
begin
    if max_rows < 0 then
        max_rows := 0;
    end if;
    select t.* into c from pycontext.chat t where t.chat_id = uncounted_messages.chat_id;
    if not found then
        c.source := pycontext._source_of(chat_id);
        c.profile := 'default';
        c.chat_id := chat_id;
    end if;
    select t.* into p from pycontext.profile t where t.profile = c.profile;
    v_encoding := coalesce(encoding, p.encoding);
    if c.source is not null and v_encoding = p.encoding then
        return query select u.* from pycontext._uncounted_source(c, v_encoding, p.image_tokens, max_rows) u;
    elsif v_encoding = p.encoding then
        return query
        select r.seq, r.line_no, r.message_id, k.overhead, k.texts || k.reasoning, v_encoding
        from (
            select m.* from pycontext.message m
            where m.chat_id = c.chat_id and m.encoding is null
            order by m.seq desc, m.line_no desc limit max_rows) r
        cross join lateral pycontext._count_pieces(
            case when r.line_no > 0 then to_jsonb(pycontext._line_text(r.origin, r.covers_from, r.seq, r.content #>> '{}'))
                when r.is_plain then r.content
                else pycontext._rendered(r.content, r.has_fence, r.role = 'tool' and r.unit_seq = r.seq, r.tool_call_id,
                    r.calls > 0) end,
            r.tool_calls, case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end, r.name,
            p.image_tokens) k
        union all
        select 0, 0::smallint, null, 4, array[t.content], v_encoding
        from pycontext.prompt t
        where t.chat_id = c.chat_id and t.encoding is null
            and t.act_no = (select max(q.act_no) from pycontext.prompt q where q.chat_id = c.chat_id);
    else
        return query
        select r.seq, r.line_no, r.message_id, k.overhead, k.texts || k.reasoning, v_encoding
        from (
            select t.* from pycontext._thread_rows(uncounted_messages.chat_id, c.source,
                array[pycontext._origin(c.source)], array[4611686018427387904], null, max_rows, true) t) r
        cross join lateral pycontext._count_pieces(
            case when r.is_plain then r.content
                else pycontext._rendered(r.content, r.has_fence, r.role = 'tool' and r.unit_seq = r.seq, r.tool_call_id,
                    r.calls > 0) end,
            r.tool_calls, case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end, r.name,
            p.image_tokens) k
        where not exists (
            select from pycontext.token_count t
            where t.chat_id = uncounted_messages.chat_id and t.seq = r.seq and t.line_no = 0 and t.encoding = v_encoding);
    end if;
end
$$;

-- How far the counts of what a line keeps in sight, head and request, are above what the line holds for them.
create or replace function pycontext._kept_excess(chat_id text, line_seq bigint, line_no smallint)
returns bigint
language sql stable
as $$
    select coalesce(sum(greatest(r.tokens - r.frozen_tokens, 0)), 0)::bigint
    from pycontext.message l
    cross join lateral pycontext._thread_rows(l.chat_id, null, array[l.head_from, l.request_seq], array[l.head_to, l.request_seq]) r
    where l.chat_id = _kept_excess.chat_id and l.seq = _kept_excess.line_seq and l.line_no = _kept_excess.line_no
$$;

comment on function pycontext._kept_excess(text, bigint, smallint) is
    'Private. How far counts of a line''s head and request are above what the line holds for them.';

-- Stores exact counts: [{"seq": …, "line_no": …, "tokens": …}]; seq 0 is the system prompt. Once per message and
-- encoding. Returns how many were new.
create or replace function pycontext.cache_token_counts(chat_id text, encoding text, counts jsonb)
returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    v_own text;
    v_images integer;
    v_rows integer := 0;
    v_prompt integer := 0;
    t record;
begin
    if coalesce(jsonb_typeof(counts), 'null') <> 'array' or exists (
        select from jsonb_array_elements(counts) e
        where not pycontext._is_seq(e.value ->> 'seq') or coalesce(e.value ->> 'tokens', '') !~ '^[0-9]{1,9}$'
            or coalesce(e.value ->> 'line_no', '0') !~ '^[0-9]{1,4}$') then
        perform pycontext._raise('PCX02', 'counts must be an array of {"seq", "tokens"}', left(counts::text, 200),
            'pass what uncounted_messages returned, counted');
    end if;
    if encoding is null or encoding not in ('o200k_base', 'cl100k_base') then
        perform pycontext._raise('PCX02', 'unknown encoding', format('encoding is %L', encoding),
            'use o200k_base or cl100k_base');
    end if;
    c := pycontext._lock_chat(chat_id, false);
    select p.encoding, p.image_tokens into v_own, v_images from pycontext.profile p where p.profile = c.profile;
    if c.source is null and encoding = v_own then
        with new as (
            select (e.value ->> 'seq')::bigint as seq, coalesce((e.value ->> 'line_no')::smallint, 0) as line_no,
                (e.value ->> 'tokens')::integer as tokens
            from jsonb_array_elements(counts) e
        ), done as (
            update pycontext.message m
            set tokens = n.tokens, encoding = cache_token_counts.encoding
            from new n
            where m.chat_id = c.chat_id and m.seq = n.seq and m.line_no = n.line_no and m.encoding is null
            returning m.seq, m.line_no, m.tokens, m.frozen_tokens, m.gone_act
        )
        select count(*)::integer as rows,
            coalesce(sum(d.tokens - d.frozen_tokens) filter (where d.line_no = 0 and d.gone_act is null
                and d.seq > coalesce(c.line_seq, 0)), 0) as live,
            coalesce(sum(greatest(d.tokens - d.frozen_tokens, 0)) filter (where d.line_no = 0 and d.gone_act is null and (
                d.seq > coalesce(c.line_seq, 0) or d.seq between l.head_from and l.head_to or d.seq = l.request_seq)), 0) as excess
        into t
        from done d
        left join pycontext.message l on l.chat_id = c.chat_id and l.seq = c.line_seq and l.line_no = c.line_no;
        v_rows := t.rows;
        update pycontext.chat x
        set live_tokens = x.live_tokens + t.live, excess_tokens = x.excess_tokens + t.excess
        where x.chat_id = c.chat_id and (t.live <> 0 or t.excess <> 0);
        update pycontext.prompt q
        set tokens = (e.value ->> 'tokens')::integer, encoding = cache_token_counts.encoding
        from jsonb_array_elements(counts) e
        where q.chat_id = c.chat_id and q.encoding is null and (e.value ->> 'seq')::bigint = 0
            and q.act_no = (select max(z.act_no) from pycontext.prompt z where z.chat_id = c.chat_id);
        get diagnostics v_prompt = row_count;
        return v_rows + v_prompt;
    end if;
    if encoding = v_own then
        return pycontext._cache_source_counts(c, encoding, v_images, counts);
    end if;
    insert into pycontext.token_count (chat_id, seq, line_no, encoding, tenant, tokens)
    select c.chat_id, (e.value ->> 'seq')::bigint, coalesce((e.value ->> 'line_no')::smallint, 0),
        cache_token_counts.encoding, c.tenant, (e.value ->> 'tokens')::integer
    from jsonb_array_elements(counts) e
    order by 2, 3
    on conflict on constraint token_count_pk do nothing;
    get diagnostics v_rows = row_count;
    return v_rows;
end
$$;
