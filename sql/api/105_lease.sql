-- One compaction of a chat at a time: a row with an expiry, not an open transaction. What failed is tried again later.

comment on table pycontext.lease is
    'Who is compacting a chat now, and from when on it may be tried again after failures. One row for each chat that '
    'was ever compacted under a lease. Written by claim_compaction, put_summary, fail_compaction, release_compaction.';
comment on column pycontext.lease.chat_id is 'The chat.';
comment on column pycontext.lease.tenant is 'The chat''s tenant.';
comment on column pycontext.lease.holder is 'Who holds it, as the holder calls itself; null = nobody.';
comment on column pycontext.lease.taken_at is 'When it was taken last.';
comment on column pycontext.lease.expires_at is 'From when on another may take it; null = nobody holds it.';
comment on column pycontext.lease.lapses is
    'How often in a row it ran out and was taken over. Each time it lasts twice as long, so that a slow model comes to '
    'its end, and what kills its process is tried less and less.';
comment on column pycontext.lease.failures is 'Failed passes since the last one that stored a summary.';
comment on column pycontext.lease.retry_at is 'No automatic pass before this time; null = at once.';

create or replace view pycontext.lease_row as
select
    null::text as chat_id, null::boolean as is_claimed, null::text as holder, null::timestamptz as expires_at,
    null::bigint as pass_no, null::text as encoding, null::integer as summarizer_window
where false;
comment on view pycontext.lease_row is 'Row type of claim_compaction.';
comment on column pycontext.lease_row.chat_id is 'The chat.';
comment on column pycontext.lease_row.is_claimed is 'True: the caller holds the lease. False: holder does.';
comment on column pycontext.lease_row.holder is 'Who holds it now.';
comment on column pycontext.lease_row.expires_at is 'Until when.';
comment on column pycontext.lease_row.pass_no is
    'Newest pass of the chat, 0 if there is none: where it has grown between two claims, somebody''s pass has ended.';
comment on column pycontext.lease_row.encoding is 'Tokenizer that the chat counts in.';
comment on column pycontext.lease_row.summarizer_window is
    'Context window of the summarizer''s model, from the chat''s profile, in tokens.';

create or replace view pycontext._backoff_row as
select null::timestamptz as until, null::text as reason
where false;

-- Takes the chat's compaction lease for that many seconds, once more for who has it. Returns one row in any case:
-- that another one holds it is no error, and leaves the caller's transaction as it is. PCX01, PCX02.
create or replace function pycontext.claim_compaction(chat_id text, holder text, seconds integer default 300)
returns setof pycontext.lease_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    l pycontext.lease;
    r pycontext.lease_row;
    v_now timestamptz := clock_timestamp();
begin
    if coalesce(holder, '') = '' or seconds is null or seconds not between 1 and 86400 then
        perform pycontext._raise('PCX02', 'a lease needs a holder and 1 to 86400 seconds',
            format('holder is %L, seconds is %s', holder, coalesce(seconds::text, 'null')),
            'pass a name that nobody else uses, such as host, process and a random part');
    end if;
    select t.* into l from pycontext.lease t where t.chat_id = claim_compaction.chat_id;
    if l.holder is null or l.holder = claim_compaction.holder or l.expires_at <= v_now then
        c := pycontext._lock_chat(chat_id, false);
        if c.source is not null then
            -- rows under a line may have changed unannounced: what they made is dropped before it is built on
            perform pycontext._drop_stale(c, (select min(t.seq) from pycontext._stale_lines(c.chat_id) t));
        end if;
        v_now := clock_timestamp();
        insert into pycontext.lease as t (chat_id, tenant, holder, taken_at, expires_at)
        values (c.chat_id, c.tenant, claim_compaction.holder, v_now, v_now + make_interval(secs => seconds))
        on conflict on constraint lease_pk do update
        set holder = excluded.holder, taken_at = v_now,
            lapses = least(t.lapses + coalesce(t.holder <> excluded.holder, false)::integer, 8),
            expires_at = v_now + make_interval(secs => seconds)
                * (2 ^ least(t.lapses + coalesce(t.holder <> excluded.holder, false)::integer, 8))
        where t.holder is null or t.holder = excluded.holder or t.expires_at <= v_now;
    end if;
    -- a new statement: it sees who won
    select t.chat_id, t.holder = claim_compaction.holder, t.holder, t.expires_at,
        coalesce((select max(p.pass_no) from pycontext.pass p where p.chat_id = t.chat_id), 0), f.encoding, f.summarizer_window
    into r
    from pycontext.lease t
    join pycontext.chat k on k.chat_id = t.chat_id
    join pycontext.profile f on f.profile = k.profile
    where t.chat_id = claim_compaction.chat_id;
    return next r;
end
$$;
comment on function pycontext.claim_compaction(text, text, integer) is
    'Takes the chat''s compaction lease, so that one process at a time pays for a model, and returns one row: '
    'is_claimed, who holds it and until when. That another one holds it is no error. The holder gives its name to '
    'put_summary or fail_compaction, which free the lease, or calls release_compaction; a holder that died loses it at '
    'expires_at, and one that is late may still store its summary while nobody else has taken the lease. The same '
    'holder may claim again, to keep it longer. Errors: PCX01, PCX02.';

-- Frees the lease if the holder still has it; true if it had.
create or replace function pycontext.release_compaction(chat_id text, holder text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_rows bigint;
begin
    perform from pycontext.chat t where t.chat_id = release_compaction.chat_id for update;
    update pycontext.lease t
    set holder = null, expires_at = null, lapses = 0
    where t.chat_id = release_compaction.chat_id and t.holder = release_compaction.holder;
    get diagnostics v_rows = row_count;
    return v_rows > 0;
end
$$;
comment on function pycontext.release_compaction(text, text) is
    'Gives the lease back without a result, and says whether the holder still had it. Harmless to repeat.';

-- In the committing transaction, under the chat's lock: the holder's lease is taken back, or PCX08 where another one
-- has taken it since. One that ran out and that nobody took is good. A stored summary ends the run of failures.
create or replace function pycontext._settle_lease(c pycontext.chat, holder text, outcome text)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    l pycontext.lease;
    v_now timestamptz := clock_timestamp();
begin
    select t.* into l from pycontext.lease t where t.chat_id = c.chat_id for update;
    if holder is not null and l.holder is distinct from holder and outcome = 'summarized' then
        perform pycontext._raise('PCX08', 'the lease is held by another', format('%L took it at %s, it runs until %s',
            coalesce(l.holder, 'nobody now, but another one'), l.taken_at, coalesce(l.expires_at::text, 'nothing')),
            'plan again: select * from pycontext.compaction_plan(chat_id)');
    end if;
    if outcome = 'failed' then
        insert into pycontext.lease as t (chat_id, tenant, failures, retry_at)
        values (c.chat_id, c.tenant, 1, v_now + interval '30 seconds')
        on conflict on constraint lease_pk do update
        set failures = least(t.failures + 1, 100),
            retry_at = v_now + least(interval '30 seconds' * (2 ^ least(t.failures, 10)), interval '1 hour');
    elsif outcome = 'summarized' and l.failures > 0 then
        update pycontext.lease t set failures = 0, retry_at = null where t.chat_id = c.chat_id;
    end if;
    update pycontext.lease t
    set holder = null, expires_at = null, lapses = 0
    where t.chat_id = c.chat_id and t.holder = _settle_lease.holder;
end
$$;

-- Why an automatic pass should wait, and until when; no row if it need not. until null: until the chat has grown.
create or replace function pycontext._compaction_backoff(chat_id text)
returns setof pycontext._backoff_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    l pycontext.lease;
    r pycontext._backoff_row;
    v_thrash record;
begin
    select t.* into l from pycontext.lease t where t.chat_id = _compaction_backoff.chat_id;
    if l.retry_at > statement_timestamp() then
        r.until := l.retry_at;
        r.reason := format('waiting until %s after %s', to_char(l.retry_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),
            case l.failures when 1 then 'a failed pass' else l.failures || ' failed passes in a row' end);
        return next r;
        return;
    end if;
    -- the last two passes together freed less than a tenth of the budget each, and little has come since
    select min(q.saved) as saved, max(q.saved) as most, count(*) as passes, max(q.token_budget) as budget,
        max(q.at_seq) as at_seq
    into v_thrash
    from (
        select p.tokens_before - p.tokens_after as saved, p.token_budget, p.at_seq
        from pycontext.pass p
        where p.chat_id = _compaction_backoff.chat_id and p.outcome in ('summarized', 'pruned')
        order by p.pass_no desc limit 2) q;
    if v_thrash.passes = 2 and v_thrash.most < 0.1 * v_thrash.budget and exists (
        select from pycontext.chat c
        join pycontext.message m on m.chat_id = c.chat_id and m.seq = v_thrash.at_seq and m.line_no = 0
        where c.chat_id = _compaction_backoff.chat_id and c.source is null
            and c.total_tokens - m.running_total < 0.1 * v_thrash.budget) then
        r.reason := format('the last two passes freed only %s and %s tokens, and the chat has hardly grown since',
            v_thrash.most, v_thrash.saved);
        return next r;
    end if;
end
$$;

-- Chats that are over their trigger and may be compacted now, by the figures on their own rows: no thread is walked.
create or replace view pycontext.chats_due with (security_invoker = true) as
select w.chat_id, w.tenant, w.profile, w.token_budget, w.window_tokens::integer as window_tokens,
    w.trigger_tokens, w.last_seq, w.act_no, w.updated_at
from (
    select c.chat_id, c.tenant, c.profile, c.last_seq, c.act_no, c.updated_at, q.read_budget as token_budget,
        3 + coalesce(l.head_frozen, 0) + coalesce(l.request_frozen, 0) + 16 * o.waiting
            + greatest(coalesce(p.tokens, 0) + coalesce(l.tokens, 0) + c.live_tokens,
                coalesce(greatest(p.tokens, p.frozen_tokens), 0) + coalesce(greatest(l.tokens, l.frozen_tokens), 0)
                    + c.total_tokens + c.excess_tokens - coalesce(l.running_total, 0))
            - case when c.prune_unit > coalesce(c.line_seq, 0) + 1
                then greatest(c.prune_total - c.prune_stub - b.base, 0) else 0 end as window_tokens,
        least(floor(f.trigger_ratio * u.budget), f.trigger_tokens)::integer as trigger_tokens
    from pycontext.chat c
    join pycontext.profile f on f.profile = c.profile
    -- limit: one look-up by key a chat, whatever the planner thinks of the table's size
    left join lateral (
        select t.read_budget from pycontext.message t
        where t.chat_id = c.chat_id and t.seq = c.request_seq and t.line_no = 0 limit 1) q on true
    left join lateral (
        select t.origin, t.tokens, t.frozen_tokens, t.head_frozen, t.request_frozen, t.running_total, t.running_stub
        from pycontext.message t
        where t.chat_id = c.chat_id and t.seq = c.line_seq and t.line_no = c.line_no limit 1) l on true
    left join lateral (
        select t.running_total, t.running_stub from pycontext.message t
        where t.chat_id = c.chat_id and t.seq = c.head_to and t.line_no = 0 limit 1) h on true
    left join lateral (
        select t.tokens, t.frozen_tokens from pycontext.prompt t
        where t.chat_id = c.chat_id order by t.act_no desc limit 1) p on true
    cross join lateral (
        select coalesce(floor(q.read_budget / c.token_scale)::integer, pycontext._budget(f, c.tool_tokens, c.token_scale)) as budget
        ) u
    cross join lateral (
        select count(*) filter (where (x.value ->> 'seq')::bigint > coalesce(c.line_seq, 0) and not x.value ? 'interim') as waiting
        from jsonb_each(c.open_calls) x) o
    cross join lateral (
        -- what was already short where the pruned range begins
        select case when l.origin = 'compaction' then l.running_total - l.running_stub
            else greatest(h.running_total - h.running_stub, l.running_total - l.running_stub, 0) end as base) b
    where c.source is null and f.compaction_mode = 'auto' and c.live_tokens >= 500) w
where w.window_tokens > w.trigger_tokens
    and not exists (
        select from pycontext.lease t
        where t.chat_id = w.chat_id
            and (t.expires_at > statement_timestamp() or t.retry_at > statement_timestamp()));
comment on view pycontext.chats_due is
    'Native chats over their trigger that nobody is compacting and that do not wait after a failure: what a worker '
    'looks at. Told by the figures on the chat''s row, without a walk; compaction_plan has the last word, and may '
    'still say skip. Adopted chats are not here: what they hold is not known without reading them; pycontext worker reads '
    'those that have a row in pycontext.chat, some at each look.';
comment on column pycontext.chats_due.chat_id is 'The chat.';
comment on column pycontext.chats_due.tenant is 'Its tenant.';
comment on column pycontext.chats_due.profile is 'Its profile.';
comment on column pycontext.chats_due.token_budget is
    'What the newest turn read under, to be handed to compaction_plan; null = the profile''s.';
comment on column pycontext.chats_due.window_tokens is 'Tokens of the window, nothing left out.';
comment on column pycontext.chats_due.trigger_tokens is 'Compaction starts above this.';
comment on column pycontext.chats_due.last_seq is 'Newest seq.';
comment on column pycontext.chats_due.act_no is 'Newest act: where this and last_seq stand still, so does the plan.';
comment on column pycontext.chats_due.updated_at is 'When the chat changed last.';

-- Chats with rows that no tokenizer has counted, each once, found by jumping from one to the next in the index.
create or replace view pycontext.chats_uncounted with (security_invoker = true) as
with recursive t as (
    (select m.chat_id from pycontext.message m where m.encoding is null order by m.chat_id limit 1)
    union all
    select (
        select m.chat_id from pycontext.message m
        where m.encoding is null and m.chat_id > t.chat_id order by m.chat_id limit 1)
    from t
    where t.chat_id is not null)
select t.chat_id from t where t.chat_id is not null;
comment on view pycontext.chats_uncounted is
    'Chats with rows that are estimated, not counted: what a worker counts. Native rows only.';
comment on column pycontext.chats_uncounted.chat_id is 'The chat.';
