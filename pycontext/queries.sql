-- Every statement of the package, by name. Columns are listed, ids and JSON go in as text.

-- name: create_chat
select pycontext.create_chat(
    chat_id => %(chat_id)s::text, system_prompt => %(system_prompt)s::text, profile => %(profile)s::text,
    tenant => %(tenant)s::text, owner => %(owner)s::text, source => %(source)s::text,
    metadata => %(metadata)s::jsonb) as chat_id;

-- name: append_messages
select m.chat_id, m.seq, m.message_id, m.kind, m.role, m.created_at, m.encoding
from pycontext.append_messages(chat_id => %(chat_id)s::text, messages => case when exists (
    select from pycontext.message q
    where q.chat_id = %(chat_id)s::text and q.message_id = %(request_id)s::text and q.gone_act is not null)
    then '[]' else %(messages)s::jsonb end) m;

-- name: start_turn
select t.message_id, t.seq, t.messages, t.window_tokens, t.token_budget, t.is_degraded, t.is_answered,
    t.prompt_differs, t.decision, t.reason, t.read_seq, t.reply, t.memory
from pycontext.start_turn(
    chat_id => %(chat_id)s::text, message => %(message)s::jsonb, token_budget => %(token_budget)s::integer,
    tool_tokens => %(tool_tokens)s::integer, system_prompt => %(system_prompt)s::text, profile => %(profile)s::text,
    context => %(context)s::text, format => %(format)s::text, memory => %(memory)s::text,
    query_embedding => %(query_embedding)s::real[], recall => %(recall)s::boolean,
    embedding_model => %(embedding_model)s::text, request_id => %(request_id)s::text) t;

-- name: record_usage
select u.is_taken, u.reason
from pycontext.record_usage(
    chat_id => %(chat_id)s::text, model => %(model)s::text, prompt_tokens => %(prompt_tokens)s::integer,
    seq => %(seq)s::bigint) u;

-- name: working_window
select w.ordinal, w.section, w.message_id, w.seq, w.kind, w.role, w.content, w.tool_calls, w.tool_call_id, w.name,
    w.tokens, w.is_estimate, w.is_shortened, w.is_escaped, w.created_at
from pycontext.working_window(
    chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer, as_of => %(as_of)s::text) w
order by w.ordinal;

-- name: window_items
select w.role, coalesce(o.content, w.content) as content, w.tool_calls, w.tool_call_id,
    w.is_shortened or w.is_escaped as is_changed, o.items
from pycontext.working_window(chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer) w
left join lateral (
    select t.metadata -> 'items' as items,
        -- what is blank is sent as (empty)
        case when w.role = t.role and w.role <> 'assistant' and w.content = '"(empty)"' then t.content end as content
    from pycontext.message_original(chat_id => %(chat_id)s::text, seq => w.seq) t
    where t.kind = 'message' and w.kind = 'message' and w.message_id = t.message_id) o on true
-- a stand-in for a result that is not there yet was never an item
where w.role <> 'tool' or w.message_id is not null
order by w.ordinal;

-- name: explain_window
select e.seq, e.preview, e.fate, e.by, e.reason, e.tokens, e.stored, e.role, e.section, e.message_id
from pycontext.explain_window(
    chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer, as_of => %(as_of)s::text,
    search => %(search)s::text, before_seq => %(before_seq)s::bigint, max_rows => %(max_rows)s::integer) e;

-- name: openai_messages
select pycontext.openai_messages(
    chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer) as messages;

-- name: anthropic_messages
select pycontext.anthropic_messages(
    chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer) as messages;

-- name: thread
select t.seq, t.message_id, t.kind, t.origin, t.role, t.content, t.tool_calls, t.tool_call_id, t.name, t.tokens,
    t.is_estimate, t.created_at, t.metadata, t.summary
from pycontext.thread(
    chat_id => %(chat_id)s::text, before_seq => %(before_seq)s::bigint, max_rows => %(max_rows)s::integer) t;

-- name: window_status
select s.chat_id, s.profile, s.encoding, s.token_scale::double precision as token_scale, s.token_budget,
    s.window_tokens, s.trigger_tokens, s.is_degraded, s.messages, s.last_seq, s.line_id, s.line_seq, s.line_origin,
    s.uncounted, s.act_no, s.edit_no
from pycontext.window_status(chat_id => %(chat_id)s::text) s;

-- name: compaction_plan
select p.decision, p.reason, p.token_budget, p.window_tokens, p.trigger_tokens, p.target_tokens, p.head_tokens,
    p.summary_tokens, p.tail_tokens, p.from_seq, p.to_seq, p.after_message_id, p.covered_tokens,
    p.max_summary_tokens, p.max_line_tokens, p.expected_tokens, p.edit_no
from pycontext.compaction_plan(chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer) p;

-- name: compaction_source
select s.seq, s.message_id, s.kind, s.role, s.text, s.tool_calls, s.tool_call_id, s.name, s.tokens, s.created_at,
    s.is_head, s.is_request, s.summary, s.edit_no, s.is_user, s.digest
from pycontext.compaction_source(
    chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text) s;

-- name: put_summary
select m.message_id, m.segment
from pycontext.put_summary(
    chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text, summary => %(summary)s::jsonb,
    segment => %(segment)s::jsonb, edit_no => %(edit_no)s::bigint, token_budget => %(token_budget)s::integer,
    details => %(details)s::jsonb, holder => %(holder)s::text) m;

-- name: fail_compaction
select pycontext.fail_compaction(
    chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text, outcome => %(outcome)s::text,
    reason => %(reason)s::text, details => %(details)s::jsonb, holder => %(holder)s::text) as logged;

-- name: claim_compaction
select l.is_claimed, l.holder, l.expires_at, l.pass_no, l.encoding, l.summarizer_window
from pycontext.claim_compaction(
    chat_id => %(chat_id)s::text, holder => %(holder)s::text, seconds => %(seconds)s::integer) l;

-- name: release_compaction
select pycontext.release_compaction(chat_id => %(chat_id)s::text, holder => %(holder)s::text) as released;

-- name: prune_chat
select p.pass_no, p.from_seq, p.to_seq, p.tokens_before, p.tokens_after, p.reason
from pycontext.prune_chat(chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer) p
where p.pass_no is not null;

-- name: chats_due
select d.chat_id, d.token_budget, d.last_seq, d.act_no
from pycontext.chats_due d
order by d.updated_at, d.chat_id
limit %(max_rows)s::integer;

-- name: chats_adopted
select c.chat_id, null::integer as token_budget, c.last_seq, c.act_no
from pycontext.chat c
where c.source is not null and c.chat_id > %(after)s::text
order by c.chat_id
limit %(max_rows)s::integer;

-- name: chats_uncounted
select u.chat_id from pycontext.chats_uncounted u limit %(max_rows)s::integer;

-- name: start_over
select m.chat_id, m.seq, m.message_id, m.kind, m.role, m.created_at
from pycontext.start_over(chat_id => %(chat_id)s::text, note => %(note)s::text) m;

-- name: uncounted_messages
select u.seq, u.line_no, u.overhead, u.texts, u.encoding
from pycontext.uncounted_messages(chat_id => %(chat_id)s::text, max_rows => %(max_rows)s::integer) u;

-- name: cache_token_counts
select pycontext.cache_token_counts(
    chat_id => %(chat_id)s::text, encoding => %(encoding)s::text, counts => %(counts)s::jsonb) as updated;

-- name: newest_seq
select c.last_seq from pycontext.chat c where c.chat_id = %(chat_id)s::text;

-- name: status
select f.severity, f.finding, f.detail, f.hint from pycontext.status() f;

-- name: chats
select s.chat_id, s.profile, c.tenant, c.owner, s.messages, s.last_seq, s.window_tokens, s.token_budget,
    s.trigger_tokens, s.line_seq, s.line_origin, s.uncounted,
    case when s.is_degraded then 'over budget' when s.window_tokens > s.trigger_tokens then 'compaction due' else 'ok' end
    as state, c.updated_at
from (
    select t.chat_id, t.tenant, t.owner, t.updated_at
    from pycontext.chat t
    order by t.updated_at desc, t.chat_id
    limit %(max_rows)s::integer) c
cross join lateral pycontext.window_status(chat_id => c.chat_id) s
order by c.updated_at desc, c.chat_id;

-- name: passes
select h.pass_no, h.outcome, h.reason, h.trigger, h.from_seq, h.to_seq, h.tokens_before, h.tokens_after, h.model,
    h.calls, h.seconds, h.created_at, h.summary_id
from pycontext.compaction_history h
where h.chat_id = %(chat_id)s::text and h.pass_no > %(after)s::bigint
order by h.pass_no;

-- name: flushed
select count(f.seq) as facts, min(f.seq) as from_seq, max(f.seq) as to_seq, c.flushed_seq
from pycontext.chat c
left join pycontext.fact f on f.chat_id = c.chat_id and f.source = 'flush' and f.gone_at is null
where c.chat_id = %(chat_id)s::text
group by c.flushed_seq;

-- name: remember
select f.chat_id, f.fact_id, f.seq, f.role, f.source, f.kind, f.subject, f.content, f.is_superseded, f.stated_at,
    f.created_at
from pycontext.remember(
    chat_id => %(chat_id)s::text, content => %(content)s::text, subject => %(subject)s::text,
    kind => %(kind)s::text) f;

-- name: recall
select r.kind, r.chat_id, r.seq, r.fact_id, r.message_id, r.role, r.subject, r.content,
    r.score::double precision as score, r.tokens, r.stated_at, r.beside_seq, r.beside, r.also
from pycontext.recall(
    chat_id => %(chat_id)s::text, query => %(query)s::text, query_embedding => %(query_embedding)s::real[],
    max_rows => %(max_rows)s::integer, max_tokens => %(max_tokens)s::integer,
    embedding_model => %(embedding_model)s::text) r;

-- name: chats_unflushed
select u.chat_id, pycontext.flush_owed(chat_id => u.chat_id) as message_id
from pycontext.chats_unflushed u limit %(max_rows)s::integer;

-- name: chats_unembedded
select u.chat_id from pycontext.chats_unembedded u limit %(max_rows)s::integer;

-- name: unembedded
select u.seq, u.fact_id, u.part_no, u.from_char, u.text
from pycontext.unembedded(chat_id => %(chat_id)s::text, max_rows => %(max_rows)s::integer) u;

-- name: use_embedding_model
select pycontext.use_embedding_model(model => %(model)s::text, dimension => %(dimension)s::integer)::text as done;

-- name: cache_embeddings
select pycontext.cache_embeddings(
    chat_id => %(chat_id)s::text, model => %(model)s::text, embeddings => %(embeddings)s::jsonb) as stored;

-- name: forget
select pycontext.forget(
    chat_id => %(chat_id)s::text, fact_id => %(fact_id)s::text, query => %(query)s::text) as forgotten;

-- name: memory_page
select f.chat_id, f.fact_id, f.seq, f.role, f.source, f.kind, f.subject, f.content, f.is_superseded, f.stated_at,
    f.created_at
from pycontext.memory_page(
    owner => %(owner)s::text, tenant => %(tenant)s::text, chat_id => %(chat_id)s::text,
    before => %(before)s::timestamptz, max_rows => %(max_rows)s::integer) f;

-- name: flush_source
select s.seq, s.message_id, s.role, s.is_user, s.text, s.tool_calls, s.tool_call_id, s.name, s.tokens, s.created_at,
    s.edit_no, s.flush_mode
from pycontext.flush_source(
    chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text, max_rows => %(max_rows)s::integer) s;

-- name: flush_facts
select f.fact_id, f.seq
from pycontext.flush_facts(
    chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text, facts => %(facts)s::jsonb,
    edit_no => %(edit_no)s::bigint) f;

-- name: fail_flush
select pycontext.fail_flush(chat_id => %(chat_id)s::text, reason => %(reason)s::text) as noted;

-- name: lost_values
select l.seq, l.message_id, l.role, l.kind, l.value
from pycontext.lost_values(chat_id => %(chat_id)s::text, summary_id => %(summary_id)s::text) l;

-- name: line_segments
select s.seq, s.message_id, s.is_segment, s.summary
from pycontext.line_segments(chat_id => %(chat_id)s::text, after_message_id => %(after_message_id)s::text) s;

-- name: rewind_chat
select t.seq, t.message_id, t.kind, t.origin, t.role, t.content, t.tool_calls, t.tool_call_id, t.name, t.tokens,
    t.is_estimate, t.created_at, t.metadata, t.summary
from pycontext.rewind_chat(chat_id => %(chat_id)s::text, to_message_id => %(to_message_id)s::text) t;

-- name: take_back
with gone as materialized (
    select t.seq from pycontext.rewind_chat(chat_id => %(chat_id)s::text, to_message_id => %(to_message_id)s::text) t
)
select (
    select count(*) from pycontext.append_messages(chat_id => %(chat_id)s::text, messages => %(messages)s::jsonb)) as stored
from (select from gone limit 1) g;  -- only where rows were set aside

-- name: fork_chat
select pycontext.fork_chat(
    chat_id => %(chat_id)s::text, new_chat_id => %(new_chat_id)s::text, at_message_id => %(at_message_id)s::text,
    owner => %(owner)s::text, metadata => %(metadata)s::jsonb) as chat_id;

-- name: redact_message
select m.chat_id, m.seq, m.message_id, m.kind, m.role, m.created_at
from pycontext.redact_message(chat_id => %(chat_id)s::text, message_id => %(message_id)s::text) m;

-- name: drop_summary
select m.chat_id, m.seq, m.message_id, m.kind, m.role, m.created_at
from pycontext.drop_summary(chat_id => %(chat_id)s::text, summary_id => %(summary_id)s::text) m;

-- name: pin_message
select p.seq, p.message_id, p.unit_seq, p.created_at
from pycontext.pin_message(chat_id => %(chat_id)s::text, message_id => %(message_id)s::text) p;

-- name: unpin_message
select p.seq
from pycontext.unpin_message(chat_id => %(chat_id)s::text, message_id => %(message_id)s::text) p
where p.seq is not null;

-- name: set_system_prompt
select pycontext.set_system_prompt(
    chat_id => %(chat_id)s::text, system_prompt => %(system_prompt)s::text) as act_no;

-- name: set_chat_profile
select pycontext.set_chat_profile(chat_id => %(chat_id)s::text, profile => %(profile)s::text) as act_no;

-- name: delete_chat
select d.relation, d.rows from pycontext.delete_chat(chat_id => %(chat_id)s::text) d;

-- name: forget_owner
select d.relation, d.rows
from pycontext.forget_owner(owner => %(owner)s::text, tenant => %(tenant)s::text) d;

-- name: message_original
select t.seq, t.message_id, t.kind, t.origin, t.role, t.content, t.tool_calls, t.tool_call_id, t.name, t.tokens,
    t.is_estimate, t.created_at, t.metadata, t.summary
from pycontext.message_original(
    chat_id => %(chat_id)s::text, seq => %(seq)s::bigint, for_model => %(for_model)s::boolean) t;

-- name: search_thread
select f.seq, f.message_id, f.role, f.preview, f.tokens, f.created_at
from pycontext.search_thread(
    chat_id => %(chat_id)s::text, query => %(query)s::text, max_rows => %(max_rows)s::integer,
    before_seq => %(before_seq)s::bigint, for_model => %(for_model)s::boolean) f;

-- name: inspected_chat
select c.profile, c.owner, c.tenant, c.source, f.encoding, c.token_scale::double precision as token_scale, c.flush_error,
    pycontext.schema_version() as version
from pycontext.chat c
join pycontext.profile f on f.profile = c.profile
where c.chat_id = %(chat_id)s::text
union all
select f.profile, null, d.tenant, d.source, f.encoding, f.token_scale::double precision, null,
    pycontext.schema_version()
from pycontext.source d
join pycontext.profile f on f.profile = 'default'
where d.is_default and not exists (select from pycontext.chat c where c.chat_id = %(chat_id)s::text);

-- name: newest_passes
select h.pass_no, h.created_at, h.outcome, h.reason, h.trigger, h.from_seq, h.to_seq, h.tokens_before, h.tokens_after,
    h.token_budget, h.model, h.calls, h.seconds, h.summary_id, h.lost_values, h.at_seq
from pycontext.compaction_history h
where h.chat_id = %(chat_id)s::text
order by h.pass_no desc
limit %(max_rows)s::integer;

-- name: newest_acts
select a.act_no, a.created_at, a.act, a.at_seq, a.details
from pycontext.act_history a
where a.chat_id = %(chat_id)s::text
order by a.act_no desc
limit %(max_rows)s::integer;

-- name: window_sections
select w.section, sum(w.tokens)::integer as tokens, bool_and(w.is_exact) as is_exact
from pycontext.working_window(
    chat_id => %(chat_id)s::text, token_budget => %(token_budget)s::integer, as_of => %(as_of)s::text) w
group by w.section;

-- name: read_budgets
select m.message_id, m.read_budget
from pycontext.message m
where m.chat_id = %(chat_id)s::text and m.message_id = any(%(message_ids)s::text[]) and m.read_budget is not null;
