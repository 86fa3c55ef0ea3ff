# ruff: noqa: E501 - replacements are exact
"""Breaks one rule of the SQL at a time and looks whether a test notices. `make mutate` (ARGS="-k pins" to choose).

Each mutation is an exact replacement in a file of sql/api; the file is run again over the template database of the
suite, and its fast part runs until a test fails, the likeliest first. A replacement that no longer matches is an error: the rule has moved.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "window": "tests/sql/test_window.py",
    "acts": "tests/sql/test_acts.py",
    "prune": "tests/sql/test_prune.py",
    "append": "tests/sql/test_append.py",
    "text": "tests/sql/test_text.py",
    "races": "tests/sql/test_races.py",
    "source": "tests/sql/test_source.py",
    "formats": "tests/sql/test_formats.py",
    "estimate": "tests/sql/test_estimate_tokens.py",
    "plans": "tests/sql/test_plans.py",
    "core": "tests/sql/test_core.py",
    "adopt": "tests/integration/test_adopt.py",
    "pipeline": "tests/integration/test_pipeline.py",
    "compaction": "tests/integration/test_compaction.py",
    "property": "tests/property",
}


class Mutation(NamedTuple):
    """promise: what is broken, by its number in the design or its name. likely: the tests to begin with."""

    promise: str
    name: str
    file: str
    old: str
    new: str
    likely: str


MUTATIONS = [
    Mutation("1 fits", "counts above the estimates are not made room for", "070_window",
        "case when as_of is null then c.excess_tokens else coalesce(v_excess, 0) end;", "0;",
        "window::test_a_count_above_the_estimate_of_the_head_is_made_room_for property"),
    Mutation("1 fits", "a cut row is not counted again", "080_working_window",
        "exit levels when v_sum <= v_room;", "exit levels;",
        "window::test_a_cut_that_comes_out_larger_than_asked_is_made_room_for"),
    Mutation("1 fits", "the summary costs nothing", "070_window",
        "coalesce(greatest(l.tokens, l.frozen_tokens) + coalesce(s.head_frozen, 0)", "coalesce(coalesce(s.head_frozen, 0)",
        "property"),
    Mutation("1 fits", "the system prompt costs nothing", "070_window",
        "3 + coalesce(q.cost, 0) +", "3 +",
        "window::test_system_prompt_and_tools_take_their_share property"),
    Mutation("2 valid", "no stand-ins", "080_working_window",
        "where r.calls > 0 and not exists (", "where false and not exists (",
        "window::test_a_call_whose_result_never_came_is_closed_and_the_true_result_takes_the_place"),
    Mutation("2 valid", "stand-ins for calls that have their result", "080_working_window",
        "where t.unit_seq = r.unit_seq and t.role = 'tool' and t.tool_call_id = e.value ->> 'id')",
        "where t.unit_seq = r.unit_seq and t.role = 'tool' and false)",
        "window::test_a_call_whose_result_never_came_is_closed_and_the_true_result_takes_the_place"),
    Mutation("2 valid", "a result without its call stays one", "080_working_window",
        "case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end,", "r.role,",
        "window::test_a_result_without_its_call_is_a_note"),
    Mutation("2 valid", "interim results are not replaced", "080_working_window",
        "where r.seq <= hi_seq and (r.superseded_seq is null", "where r.seq <= hi_seq and (true",
        "window::test_an_interim_result_gives_way_to_the_real_one"),
    Mutation("2 valid", "rows in order of seq, not of units", "080_working_window",
        "select 2 * r.section_no as place, r.unit_seq as first_sort,", "select 2 * r.section_no as place, r.seq as first_sort,",
        "window::test_a_user_message_while_calls_are_open_comes_after_their_results"),
    Mutation("2 valid", "a request ends on the assistant's row", "090_formats",
        "if v_last is null or v_last not in ('user', 'tool') then", "if false then",
        "window::test_a_window_ends_on_the_users_side"),
    Mutation("2 valid", "reasoning of older turns is sent", "080_working_window",
        "c.is_short, r.reasoning_tokens > 0 and r.seq < turn_seq)", "c.is_short, false)",
        "window::test_reasoning_is_whole_in_the_unfinished_turn_and_gone_in_older_ones"),
    Mutation("2 valid", "rows of the system stay that under strict roles", "090_formats",
        "w.section <> 'system' and strict_roles then", "w.section <> 'system' and false then",
        "window::test_under_strict_roles_no_row_but_the_prompt_is_the_systems"),
    Mutation("2 valid", "calls of two turns share an id", "092_responses",
        "v_used := v_used || (select jsonb_object_agg(d.value, true) from jsonb_each_text(v_ids) d);", "null;",
        "formats::test_ids_that_a_server_reuses_are_told_apart"),
    Mutation("3 cut", "a pin from before a reset is shown", "140_acts",
        "or i.unit_seq > coalesce(v_reset, 0))", "or true)",
        "acts::test_pins_go_with_their_message_and_stay_behind_a_reset"),
    Mutation("3 cut", "the window begins before the line", "070_window",
        "s.lo_seq := coalesce(l.seq, pycontext._origin(c.source));",
        "s.lo_seq := coalesce(l.seq - 1, pycontext._origin(c.source));",
        "property"),
    Mutation("3 cut", "a compaction outranks a reset at its place", "070_window",
        "order by t.seq desc, t.origin = 'reset' desc, t.line_no desc limit 1;",
        "order by t.seq desc, t.origin = 'reset', t.line_no desc limit 1;",
        "window::test_a_reset_outranks_a_compaction_of_its_place_in_a_replay_too"),
    Mutation("3 cut", "an older line that comes late wins", "100_compaction",
        "if (place, origin = 'reset') >= (coalesce(c.line_seq, -4611686018427387904), exists (",
        "if true or (place, origin = 'reset') >= (coalesce(c.line_seq, -4611686018427387904), exists (",
        "core::test_one_place_has_one_line_and_the_furthest_one_counts races::test_summaries_at_two_places_are_both_stored_and_the_furthest_counts"),
    Mutation("3 cut", "adopted: the request from before a reset", "070_window",
        "and x.line_no > 0 and x.origin = 'reset' and x.at_act <= s.hi_act",
        "and x.line_no > 0 and false and x.at_act <= s.hi_act",
        "window::test_a_compaction_after_a_reset_brings_no_request_back_from_before_it property"),
    Mutation("4 request", "the newest request may be cut", "080_working_window",
        "case when t.seq = v_request.seq or pycontext._floor_of(t, v_step, s.pin_units) = t.tokens then t",
        "case when pycontext._floor_of(t, v_step, s.pin_units) = t.tokens then t",
        "property"),
    Mutation("4 request", "a request above the border is not brought along", "080_working_window",
        "if s.mode = 'omit' and s.border_request is not null then", "if false then",
        "window::test_a_long_agentic_turn_keeps_its_request"),
    Mutation("4 request", "the line's request is not kept", "080_working_window",
        "        if s.request_seq is not null then\n            v_from", "        if false then\n            v_from",
        "property"),
    Mutation("4 request", "an injected block is taken for the request", "060_append",
        "r.role = 'user' and coalesce(r.metadata ->> 'injected', '') <> 'true';", "r.role = 'user';",
        "window::test_an_injected_block_is_neither_head_nor_request"),
    Mutation("4 request", "adopted: an injected block is taken for the request", "170_sources",
        "c.role = 'user' and coalesce(c.metadata ->> 'injected', '') <> 'true', ", "c.role = 'user', ",
        "window::test_an_injected_block_is_neither_head_nor_request"),
    Mutation("5 verbatim", "arguments are written anew", "080_working_window",
        "then r.stub_calls else r.tool_calls end, r.metadata, null::jsonb",
        "then r.stub_calls else (r.tool_calls::text || ' ')::jsonb #- '{0,function,arguments}' end, r.metadata, null::jsonb",
        "text::test_arguments_keep_every_byte window"),
    Mutation("5 verbatim", "shortening parts a character from its marks", "080_working_window",
        "'.' || v_marks || '(\\u200d.' || v_marks || ')*$', '');", "'^$', '');",
        "text::test_shortening_never_cuts_inside_a_character"),
    Mutation("5 verbatim", "shortened arguments are not JSON", "080_working_window",
        "return to_json(format('%s [… %s characters left out, #%s]', left(j #>> '{}', max_length),",
        "return (format('%s [… %s characters left out, #%s]', left(j #>> '{}', max_length),",
        "prune::test_a_pass_shortens_only_tool_output_and_arguments_and_keeps_the_tail"),
    Mutation("6 marked", "no marker where units are left out", "080_working_window",
        "if s.mode = 'omit' and s.marker_from <= s.marker_to then", "if false then",
        "core::test_what_is_left_out_is_marked_and_the_sections_stand_in_their_order"),
    Mutation("6 marked", "no marker in a window that is cut", "080_working_window",
        "    if v_from <= v_unit then\n", "    if false then\n",
        "property"),
    Mutation("6 marked", "late results of left-out units are not named", "080_working_window",
        "if s.mode = 'omit' and (s.straddles @> s.first_unit or", "if false and (s.straddles @> s.first_unit or",
        "window::test_a_late_result_of_a_unit_that_is_left_out_is_marked"),
    Mutation("6 marked", "adopted: late results of left-out units are not named", "080_working_window",
        "where w.unit_seq < first_unit and w.seq > first_unit", "where false and w.seq > first_unit",
        "window::test_a_late_result_of_a_unit_that_is_left_out_is_marked"),
    Mutation("6 marked", "a marker tells another size", "070_window",
        "s.marker_tokens := b.start_total - s.total_base + v_before;\n            s.border",
        "s.marker_tokens := 1;\n            s.border",
        "core::test_what_is_left_out_is_marked_and_the_sections_stand_in_their_order property"),
    Mutation("6 marked", "what stood before the first request is not marked", "070_window",
        "s.marker_from := pycontext._first_seq(s);  -- too much", "null;  -- too much",
        "window::test_what_stands_before_the_first_request_is_marked"),
    Mutation("6 marked", "a shortened row is not flagged", "080_working_window",
        "    r.encoding := null;\n    r.is_plain := false;\n", "    r.encoding := null;\n    r.is_plain := true;\n",
        "property"),
    Mutation("6 marked", "a marker counts the pins that are shown", "070_window",
        "- pycontext._pinned_between(v_pins, s.marker_from - 1, v_request.seq)", "- 0",
        "window::test_a_marker_does_not_count_the_pins_among_what_it_marks property"),
    Mutation("2 valid", "adopted: results come along whose calls were not read", "050_thread",
        "w.unit_seq between from_seq and v_edge else", "w.unit_seq between from_seq and to_seq else",
        "window::test_an_id_called_again_after_the_first_turn_brings_nothing_along"),
    Mutation("2 valid", "adopted: a row is there twice that was read twice", "050_thread",
        "filter (where (s.walked_at @> w.seq) is not true)", "filter (where (s.walked_at @> w.unit_seq) is not true)",
        "window::test_a_late_result_between_the_rows_read_first_and_last_is_there_once"),
    Mutation("2 valid", "adopted: the first turn is head and tail", "070_window",
        "if s.walked_units[cardinality(s.walked_units)] > s.lo_seq then", "if true then",
        "window::test_a_late_result_of_what_stands_before_the_first_turn"),
    Mutation("7 prefix", "the head holds a call that waits", "070_window",
        "h.waiting = 0 and h.total", "h.total",
        "window::test_the_head_ends_before_a_call_that_waits"),
    Mutation("7 prefix", "the border slides", "070_window",
        "v_grid := pycontext._grid_budget(s.profile_budget, s.token_budget) / 3;", "v_grid := 1;",
        "window::test_over_the_budget_the_prefix_moves_in_steps"),
    Mutation("7 prefix", "a late result is no act", "060_append",
        "        if v_act is not null then\n            c.act_no := v_act;", "        if false then\n            c.act_no := v_act;",
        "window::test_a_call_whose_result_never_came_is_closed_and_the_true_result_takes_the_place property"),
    Mutation("7 prefix", "a pruning pass is forgotten", "070_window",
        "if s.prune_unit is not null and s.marker_from is null then", "if false then",
        "prune::test_a_pass_shortens_only_tool_output_and_arguments_and_keeps_the_tail"),
    Mutation("8 replay", "lines that were dropped since are not seen", "070_window",
        "and (t.gone_act is null or t.gone_act > s.hi_act)\n        order by t.seq desc, t.origin = 'reset' desc",
        "and t.gone_act is null\n        order by t.seq desc, t.origin = 'reset' desc",
        "window::test_a_replay_reads_the_line_that_was_dropped_since"),
    Mutation("8 replay", "rows that were set aside since are not seen", "050_thread",
        "and r.unit_seq >= from_seq[i] and r.at_act <= as_of_act\n                and (r.gone_act is null or r.gone_act > as_of_act)",
        "and r.unit_seq >= from_seq[i] and r.at_act <= as_of_act\n                and r.gone_act is null",
        "acts::test_rewind_keeps_what_was_set_aside_for_replay"),
    Mutation("8 replay", "late results of a range are not seen", "050_thread",
        "and r.line_no = 0 and r.gone_act is null and r.at_act <= as_of_act\n            union all\n            select i, r.* from",
        "and r.line_no = 0 and false\n            union all\n            select i, r.* from",
        "window::test_a_pinned_unit_is_replayed_whole property"),
    Mutation("8 replay", "today's prompt", "070_window",
        "where t.chat_id = c.chat_id and t.act_no <= s.hi_act order by t.act_no desc limit 1;",
        "where t.chat_id = c.chat_id order by t.act_no desc limit 1;",
        "acts::test_a_new_prompt_is_an_act_and_replays_as_it_was"),
    Mutation("8 replay", "the profile's budget, not the one that was read", "070_window",
        "s.token_budget := coalesce(floor(token_budget / c.token_scale)::integer, v_read, c.budget);",
        "s.token_budget := coalesce(floor(token_budget / c.token_scale)::integer, c.budget);",
        "property"),
    Mutation("8 replay", "a window that is cut is called exact", "080_working_window",
        "s.is_exact := s.act_arg is null and s.is_exact;", "null;",
        "window::test_a_cut_is_not_called_exact_in_a_replay"),
    Mutation("9 count", "calls cost nothing beside their text", "030_render",
        "overhead := overhead + 12 * jsonb_array_length(tool_calls);", "null;",
        "window::test_arguments_of_calls_are_counted"),
    Mutation("9 count", "images are free", "030_render", "overhead := 4 + images * image_tokens", "overhead := 4",
        "window::test_an_image_costs_a_flat_rate_whatever_its_bytes"),
    Mutation("9 count", "the budget is not divided by token_scale", "070_window",
        "s.token_budget := coalesce(floor(token_budget / c.token_scale)::integer,",
        "s.token_budget := coalesce(token_budget,",
        "window::test_a_scale_divides_the_budget_and_no_count"),
    Mutation("9 count", "a count below what a row must take is believed", "060_append",
        "and (v_count ->> 'count')::integer >= k.overhead", "",
        "append::test_a_given_count_is_taken_and_an_absurd_one_is_not"),
    Mutation("10 flat", "a border is sought from the line on", "070_window",
        "v_floor := greatest(s.hi_seq - v_back, s.lo_seq + 1);", "v_floor := s.lo_seq + 1;",
        "plans::test_hot_paths_fetch_what_the_window_holds"),
    Mutation("10 flat", "the first turn is looked for again", "070_window",
        "if s.source is null and s.reset_seq = s.lo_seq and s.chat_head_to <= s.hi_seq then", "if false then",
        "plans::test_hot_paths_fetch_what_the_window_holds"),
    Mutation("10 flat", "content of rows that are not sent is read", "080_working_window",
        "then to_jsonb(r.stub)", "then to_jsonb(r.stub || left(r.content::text, 0))",
        "plans::test_content_that_is_not_sent_is_never_read"),
    Mutation("11 one counter", "Han and Kana cost a third", "020_tokens",
        "83, 228, 67, 80, 72,", "27, 76, 22, 80, 72,",
        "estimate"),
    Mutation("11 one counter", "Cyrillic costs half", "020_tokens",
        "array[32, 160, 148, 110,", "array[16, 80, 74, 110,",
        "estimate"),
    Mutation("11 one counter", "a better count moves what borders stand on", "110_counts",
        "set tokens = n.tokens, encoding", "set tokens = n.tokens, frozen_tokens = n.tokens, encoding",
        "window::test_a_better_count_moves_no_border"),
    Mutation("11 one counter", "an exact count changes nothing", "110_counts",
        "set tokens = n.tokens, encoding", "set encoding",
        "core::test_exact_counts_replace_estimates"),
    Mutation("11 one counter", "adopted: a count stays though its row was rewritten", "170_sources",
        "d.count_hash = d.body_hash + o.is_orphan::integer as is_counted", "d.count_hash is not null as is_counted",
        "adopt::test_counts_follow_the_row"),
    Mutation("12 pins", "pins are cut like other rows", "080_working_window",
        "when r.line_no > 0 or r.unit_seq = any (pin_units) then r.tokens", "when r.line_no > 0 then r.tokens",
        "window::test_a_pin_in_a_tail_that_is_cut_stays_whole"),
    Mutation("12 pins", "the newest pin gives way first", "080_working_window",
        "array_position(s.pin_units, p.unit_seq) as place", "-array_position(s.pin_units, p.unit_seq) as place",
        "window::test_where_pins_do_not_fit_the_oldest_pin_gives_way_first property"),
    Mutation("1 fits", "a late result of what stands before the head comes with it", "070_window",
        "if v_total > s.total_base and s.straddles @> s.head_to + 1 then", "if false then",
        "window::test_a_late_and_large_result_of_what_stands_before_the_first_turn_does_not_come_with_it property"),
    Mutation("6 marked", "a marker stands for a pinned unit", "070_window",
        "array_append(v_shown, v_request.seq)", "array_append(s.pin_units, v_request.seq)",
        "window::test_no_marker_stands_for_a_pinned_unit property"),
    Mutation("2 valid", "adopted: what answered a call before is not read", "050_thread",
        "where t.role = 'tool' and t.tool_call_id = any (v_ids))) r", "where false)) r",
        "source::test_a_second_answer_belongs_to_no_call_wherever_reading_begins"),
    Mutation("12 pins", "adopted: results that came after the pin are not its unit's", "050_thread",
        "on case when newest_first then w.seq else w.unit_seq end between", "on w.seq between",
        "window::test_a_pinned_unit_takes_the_results_that_come_late_and_no_other_unit"),
    Mutation("12 pins", "pins of any size are taken", "140_acts", "if v_pins > v_room then", "if false then",
        "acts::test_pins_leave_room_for_the_newest_turn"),
    Mutation("edit_no", "a stale summary is stored", "100_compaction",
        "if edit_no is not null and edit_no <> c.edit_no then", "if false then",
        "races::test_what_happens_between_reading_and_storing"),
    Mutation("edit_no", "a rewind is no edit", "140_acts",
        "pycontext._log_act(c, 'rewound', true,", "pycontext._log_act(c, 'rewound', false,",
        "races::test_what_happens_between_reading_and_storing"),
    Mutation("edit_no", "a redaction is no edit", "140_acts",
        "pycontext._log_act(c, 'redacted', true,", "pycontext._log_act(c, 'redacted', false,",
        "races::test_what_happens_between_reading_and_storing"),
    Mutation("edit_no", "a dropped line is no edit", "140_acts",
        "pycontext._log_act(c, 'dropped', true,", "pycontext._log_act(c, 'dropped', false,",
        "races::test_what_happens_between_reading_and_storing property"),
    Mutation("edit_no", "a change of the product's row is no edit", "170_sources",
        "c := pycontext._log_act(c, 'stale', true,", "c := pycontext._log_act(c, 'stale', false,",
        "adopt::test_a_changed_row_takes_the_lines_over_it_along property"),
    Mutation("rewind", "lines stay", "140_acts",
        "where m.chat_id = c.chat_id and m.seq > v_to and m.gone_act is null;\n    update pycontext.pin",
        "where m.chat_id = c.chat_id and m.seq > v_to and m.gone_act is null and m.line_no = 0;\n    update pycontext.pin",
        "acts::test_rewind_sets_rows_and_lines_aside"),
    Mutation("redact", "merged texts keep what was erased", "140_acts",
        "v_lines := pycontext._redact_lines(c, r);", "v_lines := 0;",
        "acts::test_a_redacted_message_is_nowhere"),
    Mutation("fork", "rows after the place come along", "140_acts",
        "where m.chat_id = c.chat_id and m.seq <= at_seq and m.gone_act is null\n        order by m.seq, m.line_no",
        "where m.chat_id = c.chat_id and m.gone_act is null\n        order by m.seq, m.line_no",
        "acts::test_a_fork_has_the_rows_up_to_there_and_the_lines_inside"),
    Mutation("cut", "the plan splits units", "100_compaction",
        "v_unit := coalesce(v_straddled, v_unit);", "null;",
        "window::test_no_plan_cuts_between_a_call_and_its_late_result"),
    Mutation("cut", "calls that wait are summarized away", "100_compaction",
        "    if v_unit < b.unit_seq then\n", "    if false then\n",
        "window::test_a_pending_call_is_not_summarized_away_and_is_answered_in_its_place"),
    Mutation("cut", "adopted: calls that wait are summarized away", "100_compaction",
        "v_unit := least(pycontext._waiting_unit(s, b.unit_seq), b.unit_seq);", "null;",
        "source property"),
    Mutation("cut", "automatic cuts are on no grid", "100_compaction",
        "v_grid := greatest(pycontext._grid_budget(s.profile_budget, s.token_budget) / 8, 1);", "v_grid := 1;",
        "window::test_cuts_of_tabs_a_few_messages_apart_are_at_one_place"),
    Mutation("cut", "adopted: the youngest rows are taken in", "170_sources",
        "where p.seq < border_seq and not p.is_young and p.last_seq = p.seq;",
        "where p.seq < border_seq and p.last_seq = p.seq;",
        "source::test_no_cut_takes_in_a_row_that_may_still_have_an_older_neighbour"),
    Mutation("cut", "adopted: the youngest rows are taken in where no tool is called", "170_sources",
        "where not p.is_young\n", "where true\n",
        "adopt::test_a_late_commit_with_a_lower_id_reaches_the_model"),
    Mutation("stale", "adopted: stale lines are not found", "170_sources",
        "and d.digest is not null\n", "and false\n",
        "adopt::test_unannounced_changes_are_found"),
    Mutation("line", "the id does not count what is gone", "100_compaction",
        "jsonb_build_array(c.chat_id, place, origin, v_gone)::text", "jsonb_build_array(c.chat_id, place, origin)::text",
        "property acts"),
    Mutation("fence", "fence tags of others are left as they are", "030_render",
        "select body ~* '<[\\\\/\\s]*(memory-context|chat-summary|turn-context|system-note)'", "select false",
        "text::test_fence_tags_of_users_are_plain_text_in_every_spelling"),
    Mutation("lease", "a lease is had by two", "105_lease",
        "where t.holder is null or t.holder = excluded.holder or t.expires_at <= v_now;", "where true;",
        "pipeline::test_only_one_of_many_sessions_gets_the_lease"),
    Mutation("lease", "a lease never ends", "105_lease",
        "if l.holder is null or l.holder = claim_compaction.holder or l.expires_at <= v_now then",
        "if l.holder is null or l.holder = claim_compaction.holder then",
        "pipeline::test_the_lease_in_sql"),
    Mutation("prune", "a pass that gains little", "100_compaction",
        "r.prune_tokens < 0.1 * r.token_budget", "false",
        "prune::test_a_gain_of_less_than_a_tenth_of_the_budget_is_left_alone"),
]  # fmt: skip


def broken(mutation: Mutation) -> str:
    text = (ROOT / "sql" / "api" / f"{mutation.file}.sql").read_text()
    if text.count(mutation.old) == 0 or mutation.old == mutation.new:
        sys.exit(
            f"{mutation.promise}: {mutation.name}: sql/api/{mutation.file}.sql has no longer\n{mutation.old}"
        )
    return text.replace(mutation.old, mutation.new)


def run(mutation: Mutation, folder: Path, timeout: float) -> str:
    """The first test that fails: of the likely ones, else of all."""
    file = folder / "broken.sql"
    file.write_text(broken(mutation))
    likely = []
    for one in mutation.likely.split():
        name, _, test = one.partition("::")
        likely.append(FILES[name] + (f"::{test}" if test else ""))
    end = time.monotonic() + timeout
    for tests in (likely, [*FILES.values()]):
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no",
            "-k", "not pg15 and not pg16", *tests,
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYCONTEXT_BROKEN_SQL": str(file)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=end - time.monotonic())
            except BaseException as error:
                process.send_signal(signal.SIGINT)  # so that it stops its server
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"**not caught in {timeout:.0f} s**"
                raise
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed:
            return failed[0].split(" - ")[0].split("::")[-1]
        if process.returncode != 0:
            sys.exit(f"{mutation.promise}: {mutation.name}: no test ran\n{output}")
    return "**survived**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only mutations whose promise or name contains this")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one mutation")
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background it would be ignored, by pytest too
    for mutation in MUTATIONS:
        broken(mutation)
    chosen = [m for m in MUTATIONS if options.k in f"{m.promise} {m.name}"]
    print("| promise | broken on purpose | the first test that fails | s |\n|---|---|---|--:|")
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        for mutation in chosen:
            start = time.monotonic()
            result = run(mutation, Path(folder), options.timeout)
            survived += result.startswith("**")
            seconds = time.monotonic() - start
            print(f"| {mutation.promise} | {mutation.name} | {result} | {seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} caught")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
