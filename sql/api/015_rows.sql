-- Row types of the functions that return sets. They are views, so that columns can be added at the end.
create or replace view pycontext.window_row as
select
    null::integer as ordinal, null::text as section, null::text as message_id, null::bigint as seq,
    null::text as kind, null::text as role, null::jsonb as content, null::jsonb as tool_calls,
    null::text as tool_call_id, null::text as name, null::integer as tokens, null::boolean as is_estimate,
    null::boolean as is_shortened, null::boolean as is_escaped, null::timestamptz as created_at,
    null::boolean as is_exact
where false;

create or replace view pycontext.thread_row as
select
    null::bigint as seq, null::text as message_id, null::text as kind, null::text as origin, null::text as role,
    null::jsonb as content, null::jsonb as tool_calls, null::text as tool_call_id, null::text as name,
    null::integer as tokens, null::boolean as is_estimate, null::timestamptz as created_at,
    null::jsonb as metadata, null::jsonb as summary
where false;

create or replace view pycontext.turn_start as
select
    null::text as message_id, null::bigint as seq, null::jsonb as messages, null::integer as window_tokens,
    null::integer as token_budget, null::boolean as is_degraded, null::boolean as is_answered,
    null::boolean as prompt_differs, null::text as decision, null::text as reason, null::text as encoding,
    null::bigint as read_seq, null::numeric as token_scale, null::text as reply, null::text as memory
where false;

create or replace view pycontext.window_status_row as
select
    null::text as chat_id, null::text as profile, null::text as encoding, null::numeric as token_scale,
    null::integer as token_budget, null::integer as window_tokens, null::integer as trigger_tokens,
    null::boolean as is_degraded, null::bigint as messages, null::bigint as last_seq, null::text as line_id,
    null::bigint as line_seq, null::text as line_origin, null::bigint as uncounted, null::bigint as act_no,
    null::bigint as edit_no, null::text as model, null::numeric as next_token_scale
where false;

create or replace view pycontext.compaction_plan_row as
select
    null::text as decision, null::text as reason, null::integer as token_budget, null::integer as window_tokens,
    null::integer as trigger_tokens, null::integer as target_tokens, null::integer as head_tokens,
    null::integer as summary_tokens, null::integer as tail_tokens, null::bigint as from_seq, null::bigint as to_seq,
    null::text as after_message_id, null::integer as covered_tokens, null::integer as max_summary_tokens,
    null::integer as expected_tokens, null::bigint as edit_no, null::bigint as prune_to_seq, null::integer as prune_tokens,
    null::integer as max_line_tokens
where false;

create or replace view pycontext.compaction_source_row as
select
    null::bigint as seq, null::text as message_id, null::text as kind, null::text as role, null::jsonb as content,
    null::text as text, null::jsonb as tool_calls, null::text as tool_call_id, null::text as name,
    null::integer as tokens, null::timestamptz as created_at, null::boolean as is_head, null::boolean as is_request,
    null::jsonb as summary, null::bigint as edit_no, null::boolean as is_user, null::text as digest
where false;

create or replace view pycontext.uncounted_row as
select
    null::bigint as seq, null::smallint as line_no, null::text as message_id, null::integer as overhead,
    null::text[] as texts, null::text as encoding
where false;

create or replace view pycontext.finding_row as
select null::text as severity, null::text as finding, null::text as detail, null::text as hint
where false;

-- A row of the thread as it is read: the narrow columns that plan a window, then the content.
create or replace view pycontext._stored_row with (security_invoker = true) as
select
    m.chat_id, m.gone_act, m.seq, m.line_no, m.kind, m.role, m.unit_seq, m.tokens, m.frozen_tokens, m.stub_tokens,
    m.reasoning_tokens, m.running_total, m.running_stub, m.images, m.calls, m.is_user, m.is_plain, m.has_fence,
    m.after_user, m.superseded_seq, m.at_act, m.encoding, m.message_id, m.tool_call_id, m.name, m.created_at,
    m.origin, m.stub, m.stub_calls, m.content, m.tool_calls, m.metadata, m.summary
from pycontext.message m;

create or replace view pycontext._thread_row with (security_invoker = true) as
select 0 as section_no, r.* from pycontext._stored_row r where false;

-- What one read of a window stands on: bounds, limits, costs, and the border where it must leave something out.
create or replace view pycontext._window_state as
select
    null::text as chat_id, null::text as source, null::text as profile, null::text as encoding,
    null::numeric as token_scale, null::integer as image_tokens, null::integer as head_tokens,
    null::numeric as tail_ratio, null::integer as token_budget, null::integer as profile_budget,
    null::bigint as act_no, null::bigint as edit_no,
    null::bigint as hi_seq, null::bigint as hi_act, null::bigint as act_arg, null::bigint as lo_seq,
    null::bigint as floor_seq, null::bigint as total_hi, null::bigint as total_base, null::bigint as stub_hi,
    null::bigint as stub_base, null::integer as fixed_tokens, null::bigint as turn_seq, null::boolean as has_open,
    null::jsonb as open_calls, null::int8multirange as straddles, null::bigint as counted_tokens,
    null::text as prompt, null::integer as prompt_tokens, null::text as prompt_encoding,
    null::timestamptz as prompt_created_at,
    null::bigint as line_seq, null::text as line_id, null::text as line_origin,
    null::jsonb as line_content, null::integer as line_tokens, null::text as line_encoding,
    null::bigint as line_covers_from, null::timestamptz as line_created_at, null::bigint as line_total,
    null::bigint as request_seq, null::bigint as head_from, null::bigint as head_to, null::integer as head_frozen,
    null::boolean as is_head_cut, null::boolean as is_exact, null::bigint as chat_head_from, null::bigint as chat_head_to,
    null::bigint as chat_head_base, null::bigint as reset_seq,
    null::bigint as prune_unit, null::bigint as prune_total, null::bigint as prune_stub, null::bigint as prune_request,
    null::integer as pins, null::bigint[] as pin_units, null::bigint[] as pin_from, null::bigint[] as pin_to, null::bigint as pin_tokens,
    null::text as mode, null::bigint as first_unit, null::bigint as marker_from, null::bigint as marker_to,
    null::bigint as marker_tokens, null::bigint as border_request,
    null::pycontext._stored_row[] as walked, null::int8multirange as walked_at, null::bigint[] as walked_units,
    null::bigint[] as walked_starts, null::bigint[] as walked_users, null::bigint as first_seq, null::bigint as stale_seq
where false;

-- A unit as a border: where it starts, on the thread and on the running totals.
create or replace view pycontext._border_row as
select null::bigint as unit_seq, null::bigint as start_total, null::bigint as start_stub, null::bigint as after_user
where false;

-- A row as a place: who wrote it, where it stands on the running totals, what it costs, the request before it.
create or replace view pycontext._place_row as
select
    null::bigint as seq, null::text as message_id, null::bigint as unit_seq, null::boolean as is_user,
    null::bigint as running_total, null::bigint as running_stub, null::integer as frozen_tokens,
    null::integer as stub_tokens, null::bigint as after_user
where false;

-- What a line keeps in sight from before it: the head and the newest request.
create or replace view pycontext._line_frame_row as
select
    null::bigint as head_from, null::bigint as head_to, null::integer as head_frozen, null::bigint as request_seq,
    null::integer as request_frozen
where false;

-- A live pin with its unit: what it spans and what it costs.
create or replace view pycontext._pin_row as
select
    null::bigint as seq, null::text as message_id, null::bigint as unit_seq, null::bigint as to_seq,
    null::bigint as at_act, null::integer as tokens
where false;
