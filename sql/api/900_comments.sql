-- What every object is, so that \d+ and \df+ read as the manual. Tokens are tokens of the profile's encoding.
-- estimate_tokens and table migration are commented where they are made; the installer comments the schema, where
-- it is ours to comment.

-- Tables. Private: functions and views are the contract.

comment on table pycontext.profile is
    'Named limits that chats refer to; an edit takes effect at each chat''s next read and is not replayed. Shipped: '
    'default, small-8k, long-1m, claude-200k.';
comment on column pycontext.profile.profile is 'Name of the profile; one name for all tenants.';
comment on column pycontext.profile.tenant is 'Tenant the profile belongs to; empty = shared by all.';
comment on column pycontext.profile.encoding is 'Tokenizer that counts are made in: o200k_base or cl100k_base.';
comment on column pycontext.profile.token_scale is
    'Tokens the model counts for one token of encoding. Counts stay unscaled, the budget is divided by it; copied to '
    'a chat when it is created.';
comment on column pycontext.profile.context_window is 'The model''s context window, in its own tokens.';
comment on column pycontext.profile.response_reserve is
    'Tokens kept free for the reply; never more than a quarter of context_window counts.';
comment on column pycontext.profile.memory_tokens is
    'Tokens kept free for recalled memory and context; never more than an eighth of context_window counts.';
comment on column pycontext.profile.head_tokens is
    'Most tokens of the head (the first turn). Whole units only; the first user message is kept even if it is larger.';
comment on column pycontext.profile.tail_ratio is
    'Share of the token budget that the protected tail may take: the freshest units, never summarized.';
comment on column pycontext.profile.summary_ratio is
    'Share of the profile''s budget that a summary may take; held between 500 and 4000 tokens, and under an eighth '
    'of that budget. Its list of files, ids and addresses may add up to 500, the two together under that eighth.';
comment on column pycontext.profile.trigger_ratio is 'Compaction starts above this share of the token budget.';
comment on column pycontext.profile.trigger_tokens is
    'Compaction starts above this many tokens if that is sooner than trigger_ratio; null = only the ratio counts.';
comment on column pycontext.profile.target_ratio is 'Share of the token budget that compaction aims at.';
comment on column pycontext.profile.image_tokens is 'Flat count of one image or file, in tokens; its bytes are never counted.';
comment on column pycontext.profile.strict_roles is
    'True: system and developer messages inside the thread are sent to OpenAI as fenced user messages. For Anthropic '
    'they always are.';
comment on column pycontext.profile.compaction_mode is
    'auto; warn: the plan reports what is over the trigger and skips; off: the plan is always none. The cut can be '
    'asked for in each.';
comment on column pycontext.profile.summarizer_window is
    'Context window of the summarizer''s model, in tokens; for the process that calls it. No SQL reads it.';
comment on column pycontext.profile.settle_seconds is
    'Adopted chats: age in seconds from which a row''s place is taken to be final, ids having been committed out of '
    'order.';

comment on table pycontext.source is
    'Relations of the product that hold its messages. They are read where they are, never written.';
comment on column pycontext.source.source is 'Name of the source.';
comment on column pycontext.source.tenant is 'Tenant the source belongs to; empty = shared by all.';
comment on column pycontext.source.relation is 'Quoted, schema-qualified name of the table or view that is read.';
comment on column pycontext.source.is_default is
    'True: a chat id without a row in table chat belongs to this source. At most one source is.';
comment on column pycontext.source.created_at is 'When it was registered first.';

comment on table pycontext.chat is
    'One row a conversation, locked by everything that changes it. Its running figures let a window be planned '
    'without walking the chat.';
comment on column pycontext.chat.chat_id is 'What the product calls the conversation.';
comment on column pycontext.chat.tenant is 'Isolation border; empty = none. Copied to every row of the chat.';
comment on column pycontext.chat.owner is 'Whose memory the chat feeds and reads; null = this chat alone.';
comment on column pycontext.chat.profile is 'The limits it runs under.';
comment on column pycontext.chat.source is 'Source its messages live in; null = native, they are in table message.';
comment on column pycontext.chat.token_scale is
    'The budget is divided by it: the profile''s when the row was made, then what record_usage learned, taken over at a pass.';
comment on column pycontext.chat.tool_tokens is
    'Tokens of the tool schemas, as last given to start_turn; taken off the profile''s budget.';
comment on column pycontext.chat.last_seq is
    'Seq of the newest message; the counter that appends take from. 0 = none, and always so for adopted chats.';
comment on column pycontext.chat.act_no is 'Number of the newest act.';
comment on column pycontext.chat.edit_no is
    'Raised by acts that take something back; begins with the time the chat was made, in microseconds since 1970 (0: a chat '
    'that came from the default source by itself). A summary planned under another number is refused (PCX07).';
comment on column pycontext.chat.total_tokens is 'Sum of frozen_tokens over all messages ever appended.';
comment on column pycontext.chat.stub_total is 'Sum of stub_tokens over all messages ever appended.';
comment on column pycontext.chat.live_tokens is
    'Sum of tokens, by the best count there is, over the messages after the newest line.';
comment on column pycontext.chat.excess_tokens is
    'Tokens by which exact counts exceeded the frozen ones, summed over the messages after the newest line.';
comment on column pycontext.chat.line_seq is
    'Seq of the newest line, which is that of the message it follows; null = no line.';
comment on column pycontext.chat.line_no is 'line_no of the newest line.';
comment on column pycontext.chat.reset_seq is 'Seq of the newest reset; 0 = none.';
comment on column pycontext.chat.request_seq is
    'Seq of the newest real user message after the newest reset; null = none.';
comment on column pycontext.chat.head_seq is
    'Seq of the first real user message after the newest reset: where the head begins.';
comment on column pycontext.chat.head_to is 'Seq of the head''s last row.';
comment on column pycontext.chat.head_base is 'running_total before the head.';
comment on column pycontext.chat.is_head_open is 'True while the next message may still belong to the head.';
comment on column pycontext.chat.last_unit is 'Unit that started newest.';
comment on column pycontext.chat.prune_unit is
    'First unit that the last pruning pass left whole; older ones are sent pruned until a line goes past them.';
comment on column pycontext.chat.prune_total is
    'Running total where that unit starts.';
comment on column pycontext.chat.prune_stub is
    'Running total of the pruned forms where that unit starts.';
comment on column pycontext.chat.prune_request is
    'seq of the newest real user message before that unit, which keeps its images.';
comment on column pycontext.chat.straddles is
    'Ranges of seq inside units whose results came late, among other units: no line is placed right before one of them.';
comment on column pycontext.chat.open_calls is
    'Calls whose final result has not come: {call id: {seq, name, argument, pending, interim}}; interim is the seq '
    'of a result that waits for a better one.';
comment on column pycontext.chat.metadata is 'The caller''s own data; never read here.';
comment on column pycontext.chat.created_at is 'When the row was made.';
comment on column pycontext.chat.updated_at is 'When a message or a line was added last.';

comment on table pycontext.message is
    'The thread: messages, immutable once written, and summary rows ("lines"). Of an adopted chat only its lines are '
    'here.';
comment on column pycontext.message.chat_id is 'The chat.';
comment on column pycontext.message.seq is
    'Place in the chat, in order of commit; shown as #412. A line has the seq of the message it follows.';
comment on column pycontext.message.line_no is
    '0 = a message; 1, 2, … = lines that stand after the message of this seq.';
comment on column pycontext.message.kind is 'message or summary.';
comment on column pycontext.message.role is 'user, assistant, tool, system or developer; a line is user.';
comment on column pycontext.message.unit_seq is
    'Seq of the message that heads its unit: for a tool result that of the call, else its own. A unit is never split.';
comment on column pycontext.message.tokens is
    'What the row costs as it is sent, in tokens: exact where encoding is set, else estimated on the safe side.';
comment on column pycontext.message.frozen_tokens is
    'tokens as they were when the row was written. Grids and steps stand on it, so that a better count moves no '
    'border.';
comment on column pycontext.message.stub_tokens is
    'What the row costs when pruned; the same as frozen_tokens where there is nothing to prune.';
comment on column pycontext.message.reasoning_tokens is
    'Part of tokens that is reasoning; dropped, and not counted, once its turn is over.';
comment on column pycontext.message.running_total is
    'Sum of frozen_tokens up to and including this message; for a line of a native chat, that of its message.';
comment on column pycontext.message.running_stub is
    'Sum of stub_tokens up to and including this message; for a line of a native chat, that of its message.';
comment on column pycontext.message.images is 'Number of images in content.';
comment on column pycontext.message.calls is 'Number of tool calls.';
comment on column pycontext.message.is_user is 'A real user message: role user and not marked metadata.injected.';
comment on column pycontext.message.is_plain is 'True: content is sent exactly as it is stored.';
comment on column pycontext.message.has_fence is
    'True: the text contains one of our own fence tags, which is made harmless when it is sent.';
comment on column pycontext.message.after_user is
    'Seq of the newest real user message before this one; null = none since the newest reset.';
comment on column pycontext.message.superseded_seq is
    'Seq of the later result that took the place of this interim one.';
comment on column pycontext.message.at_act is
    'The chat''s act_no when the row was written; for a line, the act that placed it.';
comment on column pycontext.message.gone_act is
    'Act that set the row aside; null = it is part of the thread. Such rows are kept for replay.';
comment on column pycontext.message.read_budget is
    'token_budget that start_turn was given with this message; null = the profile''s. Replays read under it.';
comment on column pycontext.message.read_excess is
    'The chat''s excess_tokens when start_turn read with this message; null = none. Replays keep that room free.';
comment on column pycontext.message.encoding is 'Encoding of the exact count in tokens; null = tokens is an estimate.';
comment on column pycontext.message.digest is
    'First 16 bytes of the sha256 of role, content, tool_calls, tool_call_id and name: tells a retry from another '
    'message under the same id.';
comment on column pycontext.message.tenant is 'The chat''s tenant.';
comment on column pycontext.message.message_id is
    'Unique in the chat: the caller''s, or made here. A line''s is derived, so that a retry meets the same row.';
comment on column pycontext.message.tool_call_id is 'Tool results: id of the call that is answered.';
comment on column pycontext.message.name is 'Name of the speaker or tool, where the caller gave one.';
comment on column pycontext.message.created_at is 'The caller''s time, or the time of the append; it orders nothing.';
comment on column pycontext.message.origin is 'Lines: compaction or reset. Null for messages.';
comment on column pycontext.message.request_seq is
    'Lines: seq of the newest real user message up to here, kept verbatim right after the line; null where it is in '
    'the head, or there is none.';
comment on column pycontext.message.request_frozen is 'Lines: frozen_tokens of that message.';
comment on column pycontext.message.head_from is
    'Lines: first seq of the head that stays in the window before this line.';
comment on column pycontext.message.head_to is 'Lines: last seq of that head.';
comment on column pycontext.message.head_frozen is 'Lines: tokens of that head, frozen.';
comment on column pycontext.message.covers_from is 'Lines: first seq that the summary tells of.';
comment on column pycontext.message.stub_calls is
    'Tool calls with long arguments shortened inside their JSON, for when the row is pruned; null: not worth it.';
comment on column pycontext.message.stub is
    'Tool results: the one line that is sent in its place when it is pruned; null = it is not pruned.';
comment on column pycontext.message.content is
    'Text as a JSON string, or an array of parts, as it came. Lines: the summary''s text, or the reset''s note, '
    'without the fence.';
comment on column pycontext.message.tool_calls is
    'Tool calls in OpenAI''s form; arguments are the exact string they came as.';
comment on column pycontext.message.metadata is 'The caller''s own data; injected, pending and is_error are read here.';
comment on column pycontext.message.summary is
    'Lines: the structured summary: resolved, pending, active_task, decisions, facts, artifacts, notes, covers.';
comment on column pycontext.message.segment is
    'Lines: the summary of only what follows the line before; later merges are made from segments.';

comment on table pycontext.prompt is
    'System prompts of a chat, each with the act that set it. The newest is in force; the others serve replay.';
comment on column pycontext.prompt.chat_id is 'The chat.';
comment on column pycontext.prompt.act_no is 'Act that set it; 0 = given when the chat was created.';
comment on column pycontext.prompt.tenant is 'The chat''s tenant.';
comment on column pycontext.prompt.content is 'The prompt, sent byte for byte.';
comment on column pycontext.prompt.tokens is
    'What it costs in the window, in tokens: exact where encoding is set, else estimated.';
comment on column pycontext.prompt.frozen_tokens is 'tokens as they were when it was written.';
comment on column pycontext.prompt.encoding is 'Encoding of the exact count; null = an estimate.';
comment on column pycontext.prompt.created_at is 'When it was set.';

comment on table pycontext.token_count is
    'Exact counts of rows that are not ours (adopted chats), and counts in an encoding other than the profile''s.';
comment on column pycontext.token_count.chat_id is 'The chat.';
comment on column pycontext.token_count.seq is 'Seq of the row that was counted; 0 = the system prompt.';
comment on column pycontext.token_count.line_no is '0 = a message, else the line after it.';
comment on column pycontext.token_count.encoding is 'Encoding it was counted in.';
comment on column pycontext.token_count.tenant is 'The chat''s tenant.';
comment on column pycontext.token_count.tokens is 'The count, with the overhead of the message.';

comment on table pycontext.act is
    'What may have changed earlier bytes of the window, in order. Between two reads with no act between them the '
    'earlier window is a prefix of the later one.';
comment on column pycontext.act.chat_id is 'The chat.';
comment on column pycontext.act.act_no is 'Number in the chat, from 1.';
comment on column pycontext.act.tenant is 'The chat''s tenant.';
comment on column pycontext.act.act is 'What was done: summarized, reset, late_result, …';
comment on column pycontext.act.at_seq is 'The chat''s newest seq at that time.';
comment on column pycontext.act.details is 'Which rows it concerned; no content.';
comment on column pycontext.act.created_at is 'Start of the transaction that did it.';

comment on table pycontext.pass is 'Every compaction attempt, without content. Read it as view compaction_history.';
comment on column pycontext.pass.chat_id is 'The chat.';
comment on column pycontext.pass.pass_no is 'Number in the chat, from 1.';
comment on column pycontext.pass.tenant is 'The chat''s tenant.';
comment on column pycontext.pass.act_no is 'The chat''s act_no after the attempt.';
comment on column pycontext.pass.at_seq is 'The chat''s newest seq at that time.';
comment on column pycontext.pass.outcome is 'pruned, omitted, summarized, skipped or failed.';
comment on column pycontext.pass.reason is 'Why; at most 500 characters.';
comment on column pycontext.pass.trigger is 'What started it, as the caller said in details.';
comment on column pycontext.pass.from_seq is 'First seq it was about.';
comment on column pycontext.pass.to_seq is 'Last seq it was about.';
comment on column pycontext.pass.summary_id is 'message_id of the line it stored; null = none.';
comment on column pycontext.pass.token_budget is 'Token budget it ran under.';
comment on column pycontext.pass.tokens_before is 'Tokens of the window before it, nothing left out.';
comment on column pycontext.pass.tokens_after is 'Tokens of the window after it, nothing left out.';
comment on column pycontext.pass.model is 'Model or method that wrote the summary.';
comment on column pycontext.pass.calls is 'Requests sent to that model.';
comment on column pycontext.pass.prompt_tokens is 'Tokens that the model read, as its provider reported them.';
comment on column pycontext.pass.completion_tokens is 'Tokens that the model wrote, as its provider reported them.';
comment on column pycontext.pass.seconds is 'How long the summarizer took.';
comment on column pycontext.pass.lost_values is
    'Exact values that neither the line nor a fact named when it was stored, of the messages since the line before it and '
    'of that line''s text (lost_values looks at all the line covers); null: no summary was, or of over 5,000 messages.';
comment on column pycontext.pass.limits is 'The profile''s limits as they were then.';
comment on column pycontext.pass.created_at is 'Start of the transaction that logged it.';

-- Row types of the functions that return sets, and the views to look at.

comment on view pycontext.window_row is
    'Row type of working_window: one message that the model reads. Never holds rows itself.';
comment on column pycontext.window_row.ordinal is 'Place in the window, from 1.';
comment on column pycontext.window_row.section is
    'system, head, summary, request (kept from before the border), omitted (the marker of what is left out) or tail.';
comment on column pycontext.window_row.message_id is
    'Id of the row it stands for; null for the system prompt, markers and stand-ins.';
comment on column pycontext.window_row.seq is
    'Its #seq. A line: that of the message it follows; a marker: the last seq left out; null for the system prompt '
    'and stand-ins.';
comment on column pycontext.window_row.kind is 'message or summary.';
comment on column pycontext.window_row.role is
    'Role as sent; lines and markers are user, and so is a result without its call.';
comment on column pycontext.window_row.content is
    'Content as sent, fences and markers included: a JSON string or an array of parts; null where there are only '
    'calls.';
comment on column pycontext.window_row.tool_calls is 'Tool calls in OpenAI''s form.';
comment on column pycontext.window_row.tool_call_id is 'Tool results: id of the call that is answered.';
comment on column pycontext.window_row.name is 'Name of the speaker or tool, where one was given.';
comment on column pycontext.window_row.tokens is
    'What the row takes of the budget. The window takes the sum, and 3 once.';
comment on column pycontext.window_row.is_estimate is
    'True: tokens is an estimate, on the safe side; no tokenizer has counted this rendering yet.';
comment on column pycontext.window_row.is_shortened is
    'True: pruned, cut or left out; message_id and seq say where the whole of it is.';
comment on column pycontext.window_row.is_escaped is
    'True: a fence tag in the text was made harmless by one character.';
comment on column pycontext.window_row.is_exact is
    'Whether this is what was read: true now, and for a replay at a message that start_turn read under a budget it kept.';
comment on column pycontext.window_row.created_at is 'When the row it stands for was written; null for markers.';

comment on view pycontext.thread_row is
    'Row type of thread: one row of the conversation as it is stored. Never holds rows itself.';
comment on column pycontext.thread_row.seq is 'Its #seq; a line has that of the message it follows.';
comment on column pycontext.thread_row.message_id is 'Id, unique in the chat.';
comment on column pycontext.thread_row.kind is 'message or summary.';
comment on column pycontext.thread_row.origin is 'Lines: compaction or reset. Null for messages.';
comment on column pycontext.thread_row.role is 'Role as stored.';
comment on column pycontext.thread_row.content is
    'Content as stored. Lines: the summary''s text, or the reset''s note, without the fence.';
comment on column pycontext.thread_row.tool_calls is 'Tool calls in OpenAI''s form.';
comment on column pycontext.thread_row.tool_call_id is 'Tool results: id of the call that is answered.';
comment on column pycontext.thread_row.name is 'Name of the speaker or tool, where one was given.';
comment on column pycontext.thread_row.tokens is 'What the row costs verbatim, in tokens.';
comment on column pycontext.thread_row.is_estimate is 'True: no tokenizer has counted it yet.';
comment on column pycontext.thread_row.created_at is 'When it was written.';
comment on column pycontext.thread_row.metadata is 'The caller''s own data.';
comment on column pycontext.thread_row.summary is 'Lines: the structured summary.';

comment on view pycontext.turn_start is
    'Row type of start_turn: all that a turn starts with. Never holds rows itself.';
comment on column pycontext.turn_start.message_id is
    'Id of the message that was appended, or, on resuming, of the newest real user message.';
comment on column pycontext.turn_start.seq is 'Its #seq.';
comment on column pycontext.turn_start.messages is
    'What to send: an array for openai and responses, {"system", "messages"} for anthropic; for all the three by name.';
comment on column pycontext.turn_start.window_tokens is
    'Tokens that the window takes; memory, context and (continue) are not in it.';
comment on column pycontext.turn_start.token_budget is
    'Most tokens the window may take, in tokens of the encoding (token_scale taken off).';
comment on column pycontext.turn_start.is_degraded is
    'True: something was pruned, cut or left out for this window to fit, beside what a pruning pass settled.';
comment on column pycontext.turn_start.is_answered is
    'True: the message has its reply, without tool calls and not paused (metadata.stop_reason pause_turn, or a call of Anthropic''s '
    'own tools without its result), already; this is a retry. Other messages may stand between.';
comment on column pycontext.turn_start.reply is 'What that reply says.';
comment on column pycontext.turn_start.memory is
    'memory as given, and what was recalled: to be given as memory when the turn is read again, for the block to stay as it is.';
comment on column pycontext.turn_start.prompt_differs is
    'True: system_prompt is not the one stored on the chat. The stored one was sent.';
comment on column pycontext.turn_start.decision is 'What compaction_plan decided: none, prune, summarize or skip.';
comment on column pycontext.turn_start.encoding is
    'Tokenizer of the chat''s profile, for callers who count what they add.';
comment on column pycontext.turn_start.reason is 'Why.';
comment on column pycontext.turn_start.read_seq is
    'Newest #seq of what is to be sent; record_usage takes it with the provider''s count.';
comment on column pycontext.turn_start.token_scale is 'What budgets are divided by in this chat.';

comment on view pycontext.window_status_row is
    'Row type of window_status: one chat in figures. Never holds rows itself.';
comment on column pycontext.window_status_row.chat_id is 'The chat.';
comment on column pycontext.window_status_row.profile is 'The limits it runs under.';
comment on column pycontext.window_status_row.encoding is 'Encoding that tokens are counted in.';
comment on column pycontext.window_status_row.token_scale is
    'What the budget is divided by; until an adopted chat has a row, the profile''s.';
comment on column pycontext.window_status_row.model is 'Model of the newest usage that record_usage took.';
comment on column pycontext.window_status_row.next_token_scale is
    'token_scale learned for that model: taken over at the next pass.';
comment on column pycontext.window_status_row.token_budget is 'Most tokens its window may take.';
comment on column pycontext.window_status_row.window_tokens is 'Tokens that its window takes now.';
comment on column pycontext.window_status_row.trigger_tokens is 'Tokens above which compaction starts.';
comment on column pycontext.window_status_row.is_degraded is
    'True: something is pruned, cut or left out for its window to fit, beside what a pruning pass settled.';
comment on column pycontext.window_status_row.messages is 'Messages ever appended; null for adopted chats.';
comment on column pycontext.window_status_row.last_seq is 'Seq of the newest message.';
comment on column pycontext.window_status_row.line_id is 'message_id of the newest line; null = no line.';
comment on column pycontext.window_status_row.line_seq is 'Seq of the message that line follows.';
comment on column pycontext.window_status_row.line_origin is 'compaction or reset.';
comment on column pycontext.window_status_row.uncounted is
    'Rows that no tokenizer has counted, 10000 standing for all beyond; null for adopted chats.';
comment on column pycontext.window_status_row.act_no is 'Number of the newest act.';
comment on column pycontext.window_status_row.edit_no is 'What put_summary compares: see compaction_plan.';

comment on view pycontext.compaction_plan_row is
    'Row type of compaction_plan: whether to compact, why, and the cut. The columns of the cut are null where '
    'nothing can be cut. Never holds rows itself.';
comment on column pycontext.compaction_plan_row.decision is
    'none, prune, summarize or skip (over the trigger, but not worth it, not possible, or only warned of).';
comment on column pycontext.compaction_plan_row.reason is 'Why, in words.';
comment on column pycontext.compaction_plan_row.token_budget is 'Most tokens the window may take.';
comment on column pycontext.compaction_plan_row.window_tokens is
    'Tokens of the window with nothing left out: what is held against the trigger.';
comment on column pycontext.compaction_plan_row.trigger_tokens is 'Tokens above which compaction starts.';
comment on column pycontext.compaction_plan_row.target_tokens is 'Tokens that compaction aims at.';
comment on column pycontext.compaction_plan_row.head_tokens is 'Tokens of the head.';
comment on column pycontext.compaction_plan_row.summary_tokens is 'Tokens of the newest line; 0 = none.';
comment on column pycontext.compaction_plan_row.tail_tokens is 'Tokens of the tail that would be left.';
comment on column pycontext.compaction_plan_row.from_seq is 'First seq of what would be summarized.';
comment on column pycontext.compaction_plan_row.to_seq is 'Last seq of it: M, the message that the line would follow.';
comment on column pycontext.compaction_plan_row.after_message_id is
    'message_id of M: what compaction_source and put_summary take.';
comment on column pycontext.compaction_plan_row.covered_tokens is
    'Tokens of what would be summarized, less the head and the newest request, which stay in sight.';
comment on column pycontext.compaction_plan_row.max_summary_tokens is 'Most tokens the new summary should take.';
comment on column pycontext.compaction_plan_row.expected_tokens is
    'Tokens of the window afterwards, with a line of max_line_tokens.';
comment on column pycontext.compaction_plan_row.prune_to_seq is
    'Newest seq that prune_chat would send in one line; null where it would gain nothing.';
comment on column pycontext.compaction_plan_row.prune_tokens is
    'Tokens that prune_chat would gain.';
comment on column pycontext.compaction_plan_row.max_line_tokens is
    'Most tokens that the summary and its list of files, ids and addresses should take together.';
comment on column pycontext.compaction_plan_row.edit_no is
    'Hand it to put_summary, which is refused (PCX07) if the chat was edited since.';

comment on view pycontext.compaction_source_row is
    'Row type of compaction_source: one row that a summary is made of. Never holds rows itself.';
comment on column pycontext.compaction_source_row.seq is 'Its #seq.';
comment on column pycontext.compaction_source_row.message_id is 'Id, unique in the chat.';
comment on column pycontext.compaction_source_row.kind is 'message, or summary for the line before.';
comment on column pycontext.compaction_source_row.role is 'Role as stored.';
comment on column pycontext.compaction_source_row.content is 'Content as stored.';
comment on column pycontext.compaction_source_row.text is
    'Readable text of content: parts joined, [image] for an image, no reasoning.';
comment on column pycontext.compaction_source_row.tool_calls is 'Tool calls in OpenAI''s form.';
comment on column pycontext.compaction_source_row.tool_call_id is 'Tool results: id of the call that is answered.';
comment on column pycontext.compaction_source_row.name is 'Name of the speaker or tool, where one was given.';
comment on column pycontext.compaction_source_row.tokens is 'What the row costs verbatim, in tokens.';
comment on column pycontext.compaction_source_row.created_at is 'When it was written.';
comment on column pycontext.compaction_source_row.is_head is
    'True: it stays in the window as head; the summary does not retell it.';
comment on column pycontext.compaction_source_row.is_request is
    'True: it is the newest request and stays verbatim; the summary does not retell it.';
comment on column pycontext.compaction_source_row.summary is 'The line before: its structured summary, to merge into.';
comment on column pycontext.compaction_source_row.edit_no is
    'Hand it to put_summary, which is refused (PCX07) if the chat was edited since.';
comment on column pycontext.compaction_source_row.is_user is 'True where a user wrote it: role user, and not injected.';
comment on column pycontext.compaction_source_row.digest is
    'Adopted chats: pass it to put_summary as details.digest, which is refused where the product has changed a message since.';

comment on view pycontext.uncounted_row is
    'Row type of uncounted_messages: the tokens of a row are overhead plus the tokens of each text. Never holds rows '
    'itself.';
comment on column pycontext.uncounted_row.seq is 'Seq of the row; 0 = the system prompt.';
comment on column pycontext.uncounted_row.line_no is '0 = a message, else a line.';
comment on column pycontext.uncounted_row.message_id is 'Id of the row; null for the system prompt.';
comment on column pycontext.uncounted_row.overhead is
    'Tokens of the envelope: 4 a message, 12 a call, 8 a tool result, 1 for a name, images flat.';
comment on column pycontext.uncounted_row.texts is 'The texts to count, as they are sent, each for itself.';
comment on column pycontext.uncounted_row.encoding is 'Encoding to count them in.';

comment on view pycontext.finding_row is 'Row type of status: one finding. Never holds rows itself.';
comment on column pycontext.finding_row.severity is 'info, warning or error.';
comment on column pycontext.finding_row.finding is 'What was looked at.';
comment on column pycontext.finding_row.detail is 'What was found.';
comment on column pycontext.finding_row.hint is 'What to do about it; null = nothing.';

comment on view pycontext.compaction_history is
    'Every compaction attempt of every chat, one row each, without content. Bound it by chat_id.';
comment on column pycontext.compaction_history.chat_id is 'The chat.';
comment on column pycontext.compaction_history.pass_no is 'Number in the chat, from 1.';
comment on column pycontext.compaction_history.created_at is 'When it was logged.';
comment on column pycontext.compaction_history.outcome is 'pruned, omitted, summarized, skipped or failed.';
comment on column pycontext.compaction_history.trigger is 'What started it.';
comment on column pycontext.compaction_history.from_seq is 'First seq it was about.';
comment on column pycontext.compaction_history.to_seq is 'Last seq it was about.';
comment on column pycontext.compaction_history.tokens_before is 'Tokens of the window before it, nothing left out.';
comment on column pycontext.compaction_history.tokens_after is 'Tokens of the window after it, nothing left out.';
comment on column pycontext.compaction_history.saved_tokens is 'The difference.';
comment on column pycontext.compaction_history.token_budget is 'Token budget it ran under.';
comment on column pycontext.compaction_history.model is 'Model or method that wrote the summary.';
comment on column pycontext.compaction_history.calls is 'Requests sent to that model.';
comment on column pycontext.compaction_history.prompt_tokens is 'Tokens that the model read.';
comment on column pycontext.compaction_history.completion_tokens is 'Tokens that the model wrote.';
comment on column pycontext.compaction_history.seconds is 'How long the summarizer took.';
comment on column pycontext.compaction_history.at_seq is 'The chat''s newest seq at that time.';
comment on column pycontext.compaction_history.summary_id is 'message_id of the line it stored; null = none.';
comment on column pycontext.compaction_history.lost_values is
    'Exact values that neither the line nor a fact named when it was stored, of the messages since the line before it and '
    'of that line''s text (lost_values looks at all the line covers); null: no summary was, or of over 5,000 messages.';
comment on column pycontext.compaction_history.reason is 'Why.';

-- Functions that only look.

comment on function pycontext.working_window(text, integer, text) is
    'The messages that the model reads now, oldest first; all of them, plus 3, take at most token_budget tokens '
    '(null = the profile''s). as_of: a message_id, for the window as it was then; null = now, so '
    'pass coalesce(…, '''') where a look-up may find none: that is PCX02. Writes nothing and needs no model. '
    'Errors: PCX01 no such chat, PCX02 no such message, PCX05 the budget is below system prompt and newest user '
    'message (the hint names the smallest that would do).';
comment on function pycontext.openai_messages(text, integer, text, text) is
    'The window as an array for OpenAI chat completions. memory is text that goes, fenced, right before the newest '
    'user message; it is not counted and not stored. Ends with a user message (continue) where the last row is '
    'neither user nor tool. Errors: as working_window.';
comment on function pycontext.anthropic_messages(text, integer, text, text) is
    'The window for Anthropic messages: {"system": text, "messages": […]}, without "system" where the chat has no '
    'prompt; neighbours of one side are joined as separate blocks, system and developer rows inside the thread become fenced user text. memory as in '
    'openai_messages; begins and ends with a user message, (continue) where needed. Errors: as working_window.';
comment on function pycontext.thread(text, bigint, integer) is
    'The conversation as it is stored, lines included, oldest first: up to max_rows rows of units that begin '
    'before before_seq (null = from the end); rows set aside are not in it. Errors: PCX01.';
comment on function pycontext.window_status(text) is
    'One row: the chat''s limits, what its window takes now in tokens, its newest line. Errors: PCX01, PCX05.';
comment on function pycontext.compaction_plan(text, integer) is
    'One row: whether the chat should be compacted now, why, and where it would be cut. token_budget null = the '
    'profile''s. The cut is given whenever there is something to cut, whatever the decision. Decides only; writes '
    'nothing. Errors: PCX01, PCX05.';
comment on function pycontext.compaction_source(text, text) is
    'What a summary placed after message after_message_id is made of, oldest first: the compaction line before it, '
    'if that is the newest one, then the original rows from there to that message. Errors: PCX01, PCX02 no such '
    'message.';
comment on function pycontext.uncounted_messages(text, text, integer) is
    'Up to max_rows newest rows of a chat that no tokenizer has counted in encoding (null = the profile''s), as '
    'texts to count, and its system prompt where that is uncounted; of an adopted chat those that its windows read. '
    'Hand the sums to cache_token_counts. Errors: PCX01.';
comment on function pycontext.status() is
    'The state of the installation over all chats that the caller may see, a row a finding, with what to do about '
    'it. Walks every chat, and reads the windows of the 100 adopted ones that changed last: not for each turn.';
comment on function pycontext.schema_version() is 'Version of the functions that are installed.';

-- Acts. They run with the installer's rights, so a writer needs none on the tables.

comment on function pycontext.create_chat(text, text, text, text, text, text, jsonb) is
    'Gets or creates a chat and returns its id; safe on every turn and from two sessions at once. A chat that exists '
    'is left as it is, prompt, profile, tenant and owner included. Profile null = default. Errors: PCX02 empty id, '
    'PCX06 no such profile, PCX12 no such source.';
comment on function pycontext.prune_chat(text, integer) is
    'The pass without a model: tool results, long call arguments and images before the protected tail are sent in one line from now on, which names their size, outcome and #seq. Only where it gains a tenth of the budget. Logs an act and a pass; returns the pass, or null where it did nothing. PCX01, PCX05.';
comment on function pycontext.register_source(text, regclass, boolean) is
    'Registers a table or view of the product as home of chats, or changes the one of that name, and returns the '
    'name: where it reads otherwise then, what was made of rows that are not there any more is dropped, and a warning says '
    'how much. It must have chat_id, seq (an integer), message_id, role, content and created_at. is_default: chat ids '
    'without a row belong to it from now on, and no longer to another source. Errors: PCX12.';
comment on function pycontext.append_messages(text, jsonb) is
    'Appends an array of OpenAI-format messages, in order, all or none, and returns their rows; each may carry '
    'message_id, created_at, metadata and tokens {"encoding", "count"}. Holds the chat''s row until the transaction '
    'ends. A message_id that is there with the same body returns its row and writes nothing. Errors: PCX01 no such '
    'chat, PCX02 bad message, PCX03 id used with another body, PCX04 tool result without id, PCX09 adopted chat.';
comment on function pycontext.append_message(text, text, text, jsonb, text, text, text, timestamptz, jsonb) is
    'Appends one message with content as text and returns its row: append_messages for one. Errors: as '
    'append_messages.';
comment on function pycontext.append_message(text, text, jsonb, jsonb, text, text, text, timestamptz, jsonb) is
    'Appends one message with content as JSON (a string, or an array of parts) and returns its row: append_messages '
    'for one. Errors: as append_messages.';
comment on function pycontext.start_turn(
    text, jsonb, integer, integer, text, text, text, text, real[], text, boolean, text, text) is
    'The whole start of a turn in one round trip: creates the chat if it is not there, appends message (an object, '
    'or a string for a user''s text, under request_id where it has no id of its own; null = resume the turn of request_id, which '
    'the chat must have, or of the newest request), notes token_budget with it and tool_tokens on the chat, and '
    'returns what to send as format openai, anthropic (with cache marks on blocks that the next request repeats) or '
    'responses, or all three by name. memory and context go fenced before the newest user message, are not stored, and what '
    'they take over the profile''s memory_tokens is taken off its budget. A retry with the same message_id is harmless: '
    'see is_answered; where another message has come after it, what it reads ends before that one. Of an adopted chat the '
    'request is always in what is read: a line that was made without it is dropped. recall: facts and past messages '
    'that fit the message go with memory, by its words, and by query_embedding (of the message''s text, by embedding_model) where one '
    'is given, which asks for recall by itself. Two turns at once on one chat: rows stand in the order they were stored, each turn reads all that was stored '
    'before, and calls stay with their results. Errors: PCX01 to PCX06, PCX09, PCX13; 0A000 for a query_embedding without '
    'sql/extras/embeddings.sql.';
comment on function pycontext.put_summary(text, text, jsonb, jsonb, bigint, integer, jsonb, text) is
    'Stores a summary of everything up to message after_message_id as a line after it, logs the act and the pass, '
    'and returns the row. Where a line stands there already it is returned and nothing is written, so a retry and a '
    'second session get the winner''s text. details: reason, trigger, model, calls, prompt_tokens, '
    'completion_tokens, seconds, for the log; digest, of compaction_source; line_tokens, where the caller counted the text. holder: as given to claim_compaction; its lease '
    'is freed with the line. Keys and passwords in the summary are masked. '
    'Errors, with nothing stored: PCX01, PCX02 no such message, PCX07 stale edit_no or digest, empty, with a fence tag, splitting '
    'a unit, taking in a call that waits for a person, or too large, PCX08 another one has taken the lease.';
comment on function pycontext.fail_compaction(text, text, text, text, jsonb, text) is
    'Logs a compaction that stored no summary: outcome failed or skipped, and the reason, with the cut that is '
    'planned at this moment. A failure puts off the next automatic pass: 30 seconds, then twice as long each time, at '
    'most an hour. A skip for the same reason as the one before it, or while a failure is waited out, is logged once. '
    'holder: as given to claim_compaction; its lease is freed. Changes no window. Errors: PCX01, PCX02 another outcome.';
comment on function pycontext.start_over(text, text) is
    'Places a reset after the newest message, with a note for the model if one is given, and returns its row: '
    'nothing from before it reaches the model any more, and nothing is deleted. Calls no model. Where the newest '
    'line is a reset and nothing came after it, that one is returned. Errors: PCX01, PCX02 the chat is empty.';
comment on function pycontext.cache_token_counts(text, text, jsonb) is
    'Stores exact counts [{"seq", "line_no", "tokens"}], made of what uncounted_messages returned, and returns how '
    'many were new; a row is counted once in each encoding. seq 0 is the system prompt. Changes no border of a '
    'window unless it would not fit. Errors: PCX01, PCX02.';

-- Private: no contract. By name, so that a change of arguments is made in one place.
do $$
declare
    v_function record;
    v_view record;
begin
    for v_function in
        select f.oid::pg_catalog.regprocedure::text as signature, t.comment
        from (values
            ('_raise', 'Raises an error with SQLSTATE, message, detail and hint.'),
            ('_no_such_chat', 'Raises PCX01.'),
            ('_has_fence', 'Whether a text contains one of our fence tags.'),
            ('_escape_fences', 'The text with one character put into each of our fence tags.'),
            ('_is_deep', 'Whether JSON is nested deeper than every client reads it back.'),
            ('_parsed', 'A text as JSON; null where it is none, or too deep.'),
            ('_has_text', 'Whether a text has more than white space, as providers see it.'),
            ('_string', 'The text of a JSON string; null where it is none, or blank.'),
            ('_image_detail', 'How closely an image is to be looked at, where a part says so.'),
            ('_part_kind', 'Kind of a content part: text, image, reasoning, file or other.'),
            ('_part_json', 'A content part as text, a file without its data.'),
            ('_part_text', 'Text of a content part; empty where it has none.'),
            ('_content_text', 'Readable text of a content, without reasoning; images as [image].'),
            ('_escape_content', 'A content with fence tags made harmless.'),
            ('_is_blank', 'Whether a content has nothing to show.'),
            ('_without_reasoning', 'A content without its reasoning parts.'),
            ('_without_images', 'A content with words in place of its images.'),
            ('_rendered', 'A content as it is sent.'),
            ('_count_pieces', 'What a rendered message costs: overhead in tokens, the texts to count, its reasoning, its images.'),
            ('_estimate_pieces', 'Sum of estimate_tokens over texts.'),
            ('_stub', 'The one line that is sent for an old tool result.'),
            ('_main_argument', 'The argument that says what a call was about, at most 80 characters.'),
            ('_budget', 'Most tokens a window may take under a profile.'),
            ('_first_edit_no', 'Where a new chat''s edit_no begins: microseconds since 1970, so that none is had twice.'),
            ('_lock_chat', 'Locks a chat''s row and returns it; gives an adopted chat its row. PCX01, PCX09.'),
            ('_source_rows', 'Rows of an adopted chat, in the shape of our own.'),
            ('_thread_rows', 'The one reader of a thread, native or adopted, now or as of an act.'),
            ('_check_message', 'Checks one message in OpenAI''s form. PCX02, PCX04.'),
            ('_clean_calls', 'Tool calls with their arguments as strings.'),
            ('_digest', 'Digest of a message''s body.'),
            ('_border', 'The first unit that starts at or after a running total.'),
            ('_first_seq', 'Where the first unit after the newest line, or the head, begins.'),
            ('_first_unit', 'The first unit from a seq on.'),
            ('_request_before', 'The newest real user message before a unit.'),
            ('_head_range', 'Range and tokens of the first turn.'),
            ('_window_state', 'Reads a chat''s figures and decides how its window is made. PCX01, PCX02, PCX05.'),
            ('_line_text', 'A line as the model reads it, in its fence.'),
            ('_marker_text', 'The words that stand for what is left out.'),
            ('_marker_cost', 'Tokens of those words.'),
            ('_grid_budget', 'The budget that grids of borders are parts of.'),
            ('_waiting_then', 'How many calls waited for a result at the time of a replay.'),
            ('_pins_of', 'The pins of a read, in a replay those of then.'),
            ('_is_degraded', 'Whether something was pruned, cut or left out for a window to fit, beside what a pass settled.'),
            ('_late_rows', 'Results that came late, of units that are left out.'),
            ('_as_note', 'A late result as a note in its own place, its call being left out.'),
            ('_marker_end', 'The newest row that a marker before a border names.'),
            ('_rendered_rows', 'Rows of whole units as they are sent, verbatim or pruned.'),
            ('_shorten_text', 'A text cut to about so many tokens, with what is missing and its #seq.'),
            ('_shorten_json', 'A JSON value with its long strings cut.'),
            ('_shorten_arguments', 'Arguments of a call cut to so many tokens, as valid JSON.'),
            ('_cap', 'The largest cap with which costs fit, none being cut below its floor.'),
            ('_shorten_row', 'A rendered row cut to so many tokens.'),
            ('_floor_of', 'Tokens below which a row of the tail is not cut.'),
            ('_shortened_window', 'The window where even the tail must be cut. PCX05.'),
            ('_window_row', 'A rendered row as a row of the window.'),
            ('_marker_row', 'The marker as a row of the window.'),
            ('_line_row', 'A line as a row of the window.'),
            ('_section_rows', 'The rows of a window, rendered and numbered.'),
            ('_closed_section_rows', 'The rows of a window with stand-ins for results that have not come.'),
            ('_fenced', 'A text in a fence, with the fence tags inside it made harmless.'),
            ('_anthropic_blocks', 'A content as blocks for Anthropic.'),
            ('_lone_uses', 'Calls of Anthropic''s own tools without their result, and results without their call.'),
            ('_is_paused', 'Whether a reply ends at a call of one of Anthropic''s own tools.'),
            ('_is_final', 'Whether a row is a reply that its turn ends with.'),
            ('_call_ids', 'Ids of a row''s calls as they are sent, unique in the request.'),
            ('_cache_marks', 'Rows of a window that end a prefix worth keeping in Anthropic''s cache.'),
            ('_call_input', 'Arguments of a call as the object that Anthropic asks for.'),
            ('_lines', 'The live lines of a chat between two places.'),
            ('_summary_text', 'The structured summary as text.'),
            ('_summary_limit', 'Most tokens that a summary may take.'),
            ('_place_of', 'The seq of a live message. PCX02.'),
            ('_line_before', 'The newest live line placed before a seq.'),
            ('_line_frame', 'What a line keeps in sight from before it: head and request.'),
            ('_source_piece', 'How far one pass goes in a long stretch of an adopted chat.'),
            ('_line_limit', 'Most tokens a line may take, its list of files, ids and addresses included.'),
            ('_place_line', 'Places a line after a message, logs the act and brings the chat''s figures up to date.'),
            ('_log_pass', 'Logs a compaction attempt.'),
            ('_chat_state', 'Reads the figures of a chat and what bounds a read of it. PCX01, PCX02.'),
            ('_closed_rows', 'Rendered rows with stand-ins for results that have not come.'),
            ('_newest_unit', 'The unit that starts newest.'),
            ('_no_such_message', 'Raises PCX02 for a message id that the chat does not have.'),
            ('_origin', 'The place before every seq: 0 for our own rows, far below for a product''s.'),
            ('_prompt_row', 'The system prompt as a row of the window.'),
            ('_reduced', 'A content without its images, its reasoning, or both.'),
            ('_row_at', 'The row of a message by its seq, as it stood.')
        ) t (name, comment)
        join pg_catalog.pg_proc f on f.proname = t.name and f.pronamespace = 'pycontext'::pg_catalog.regnamespace
    loop
        execute pg_catalog.format('comment on function %s is %L', v_function.signature, 'Private. ' || v_function.comment);
    end loop;

    for v_view in
        select k.oid::pg_catalog.regclass::text as name, t.comment
        from (values
            ('_thread_row', 'Row type: all that a reader of a thread knows of a row.'),
            ('_window_state', 'Row type: what one read of a window stands on: figures, limits, bounds, and the border.'),
            ('_border_row', 'Row type: a unit, where it starts in the running totals, and the request before it.'),
            ('_place_row', 'Row type: a message as a place on the thread and on the running totals.'),
            ('_line_frame_row', 'Row type: what a line keeps in sight from before it: head and request.')
        ) t (name, comment)
        join pg_catalog.pg_class k on k.relname = t.name and k.relkind = 'v'
            and k.relnamespace = 'pycontext'::pg_catalog.regnamespace
    loop
        execute pg_catalog.format('comment on view %s is %L', v_view.name, 'Private. ' || v_view.comment);
    end loop;
end
$$;
