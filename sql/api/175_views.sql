-- Views for people and products. All look with the rights of whoever asks; none reads a message's content but a line's.

create or replace view pycontext.summary_line with (security_invoker = true) as
select
    m.chat_id, m.seq, m.message_id as summary_id, m.origin, m.covers_from, m.content #>> '{}' as text, m.tokens,
    m.seq = c.line_seq and m.line_no = c.line_no as is_newest, m.created_at
from pycontext.message m
join pycontext.chat c on c.chat_id = m.chat_id
where m.line_no > 0 and m.gone_act is null;

comment on view pycontext.summary_line is
    'The live lines of every chat: join your own list of messages by chat and seq to draw them. A line stands right '
    'after the message whose place is seq.';
comment on column pycontext.summary_line.chat_id is 'The chat, as text.';
comment on column pycontext.summary_line.seq is 'The line stands right after the message of this seq.';
comment on column pycontext.summary_line.summary_id is 'Its id in the thread.';
comment on column pycontext.summary_line.origin is 'compaction, or reset ("start over").';
comment on column pycontext.summary_line.covers_from is 'First seq that the summary tells of; null for a reset.';
comment on column pycontext.summary_line.text is 'The summary, or the note of a reset.';
comment on column pycontext.summary_line.tokens is 'What it takes in the window.';
comment on column pycontext.summary_line.is_newest is 'True for the line that the window starts from.';
comment on column pycontext.summary_line.created_at is 'When it was placed.';

create or replace view pycontext.chat_overview with (security_invoker = true) as
select
    c.chat_id, c.tenant, c.owner, c.profile, c.source,
    case when c.source is null then c.last_seq end as messages,
    case when c.source is null then 3 + c.live_tokens + coalesce(l.tokens, 0) + coalesce(l.head_frozen, 0)
        + coalesce(l.request_frozen, 0) + coalesce(q.tokens, 0) end as live_tokens,
    pycontext._budget(p, c.tool_tokens, c.token_scale) as token_budget,
    c.line_seq, l.origin as line_origin, z.outcome as last_outcome, z.created_at as last_pass_at, c.updated_at
from pycontext.chat c
join pycontext.profile p on p.profile = c.profile
left join pycontext.message l on l.chat_id = c.chat_id and l.seq = c.line_seq and l.line_no = c.line_no
left join lateral (
    select t.tokens from pycontext.prompt t where t.chat_id = c.chat_id order by t.act_no desc limit 1) q on true
left join lateral (
    select t.outcome, t.created_at from pycontext.pass t where t.chat_id = c.chat_id order by t.pass_no desc limit 1) z on true;

comment on view pycontext.chat_overview is
    'A row a chat, from figures that are kept: cheap over all chats. window_status(chat_id) measures one.';
comment on column pycontext.chat_overview.chat_id is 'The chat.';
comment on column pycontext.chat_overview.tenant is 'Its tenant.';
comment on column pycontext.chat_overview.owner is 'Whose memory it feeds.';
comment on column pycontext.chat_overview.profile is 'Its limits.';
comment on column pycontext.chat_overview.source is 'Where its messages live; null = here.';
comment on column pycontext.chat_overview.messages is 'Places taken so far; null for adopted chats.';
comment on column pycontext.chat_overview.live_tokens is
    'System prompt, newest line and all that stands after it, before anything is pruned or left out; null for adopted chats.';
comment on column pycontext.chat_overview.token_budget is 'Most tokens a window may take, in the encoding''s own tokens.';
comment on column pycontext.chat_overview.line_seq is 'Place of the newest line.';
comment on column pycontext.chat_overview.line_origin is 'compaction or reset.';
comment on column pycontext.chat_overview.last_outcome is 'Outcome of the newest pass.';
comment on column pycontext.chat_overview.last_pass_at is 'When that was.';
comment on column pycontext.chat_overview.updated_at is 'When the chat last changed.';

create or replace view pycontext.token_count_coverage with (security_invoker = true) as
select
    c.chat_id, p.encoding, c.source, r.rows, r.counted, r.rows - r.counted as estimated,
    round(100.0 * r.counted / nullif(r.rows, 0), 1) as percent
from pycontext.chat c
join pycontext.profile p on p.profile = c.profile
cross join lateral (
    select count(*) as rows, count(m.encoding) as counted
    from pycontext.message m
    where c.source is null and m.chat_id = c.chat_id and m.gone_act is null
    union all
    select null, count(*)
    from pycontext.token_count t
    where c.source is not null and t.chat_id = c.chat_id and t.encoding = p.encoding) r
where (r.rows is null) = (c.source is not null);

comment on view pycontext.token_count_coverage is
    'How many rows of each chat a tokenizer has counted; the others are estimated, on the safe side. Ask it for one chat: '
    'it counts rows.';
comment on column pycontext.token_count_coverage.chat_id is 'The chat.';
comment on column pycontext.token_count_coverage.encoding is 'What it is counted in.';
comment on column pycontext.token_count_coverage.source is 'Where its messages live; null = here.';
comment on column pycontext.token_count_coverage.rows is 'Live rows; null for adopted chats, whose rows are not ours to count.';
comment on column pycontext.token_count_coverage.counted is 'Rows with an exact count.';
comment on column pycontext.token_count_coverage.estimated is 'Rows without; null for adopted chats.';
comment on column pycontext.token_count_coverage.percent is 'Counted of all; null for adopted chats.';

create or replace view pycontext.act_history with (security_invoker = true) as
select a.chat_id, a.act_no, a.created_at, a.act, a.at_seq, a.details
from pycontext.act a;

comment on view pycontext.act_history is
    'What may have changed earlier bytes of a window, in order: what "act N" of explain_window was. Bound it by chat_id.';
comment on column pycontext.act_history.chat_id is 'The chat.';
comment on column pycontext.act_history.act_no is 'Number in the chat, from 1.';
comment on column pycontext.act_history.created_at is 'When it was done.';
comment on column pycontext.act_history.act is
    'summarized, pruned, reset, pinned, unpinned, rewound, redacted, dropped, prompted, profile, late_result, stale, forked.';
comment on column pycontext.act_history.at_seq is 'The chat''s newest seq at that time.';
comment on column pycontext.act_history.details is 'What it was about; no content.';
