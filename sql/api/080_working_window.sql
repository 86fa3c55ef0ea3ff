-- A line as the model reads it: background in a fence, never an order.
create or replace function pycontext._line_text(origin text, covers_from bigint, seq bigint, body text)
returns text
language sql immutable parallel safe
as $$
    select case when origin = 'reset' then
        E'<chat-summary>\nThe user started over here. Nothing from before this point applies.'
        || case when pycontext._has_text(body) then E'\nTheir note: ' || body else '' end || E'\n</chat-summary>'
    else
        format(E'<chat-summary>\nNotes on the earlier part of this conversation (#%s to #%s), for reference only. '
            'They tell what already happened and ask for nothing; the messages after them are newer.\n\n%s\n</chat-summary>',
            covers_from, seq, body)
    end
$$;

create or replace function pycontext._marker_text(from_seq bigint, to_seq bigint, tokens bigint, is_partial boolean)
returns text
language sql immutable parallel safe
as $$
    select case when to_seq > from_seq
        then format('[Messages #%s to #%s are left out here, %s %s tokens. Each can be read again by its number.]',
            from_seq, to_seq, case when is_partial then 'over' else 'about' end, tokens)
        else format('[Message #%s is left out here, %s %s tokens. It can be read again by its number.]', to_seq,
            case when is_partial then 'over' else 'about' end, tokens) end
$$;

-- Rows of whole units in the given ranges, rendered: verbatim, or (is_pruned[i]) with a stub for a tool result and
-- words for an image, but for kept units. tokens is what each takes.
create or replace function pycontext._rendered_rows(
    chat_id text, source text, from_unit bigint[], to_unit bigint[], is_pruned boolean[], act bigint, hi_seq bigint,
    turn_seq bigint, kept_units bigint[], walked pycontext._stored_row[], walked_at int8multirange)
returns setof pycontext._thread_row
language sql stable
as $$
    select r.section_no, r.chat_id, r.gone_act, r.seq, r.line_no, r.kind,
        case when r.role = 'tool' and r.unit_seq = r.seq then 'user' else r.role end,
        r.unit_seq,
        case when not c.is_short then r.tokens when r.stub is not null or r.stub_calls is not null then r.stub_tokens
            else r.tokens - r.frozen_tokens + r.stub_tokens end
            -- an estimate is on the safe side: less than it is taken off
            - case when r.seq < turn_seq then r.reasoning_tokens * 7 / 10 else 0 end,
        r.frozen_tokens, r.stub_tokens, r.reasoning_tokens, r.running_total, r.running_stub, r.images, r.calls,
        r.is_user, not c.is_short, r.has_fence, r.after_user, r.superseded_seq, r.at_act,
        case when not c.is_short and (r.reasoning_tokens = 0 or r.seq >= turn_seq) then r.encoding end,
        r.message_id, case when r.role = 'tool' and r.unit_seq <> r.seq then r.tool_call_id end,
        r.name, r.created_at, r.origin, r.stub, r.stub_calls,
        case
            when r.is_plain and r.reasoning_tokens = 0 and (not c.is_short or r.stub is null and r.images = 0) then r.content
            when c.is_short and r.stub is not null then to_jsonb(r.stub)
            else pycontext._rendered(
                pycontext._reduced(r.content, r.seq, c.is_short, r.reasoning_tokens > 0 and r.seq < turn_seq),
                r.has_fence, r.role = 'tool' and r.unit_seq = r.seq, r.tool_call_id, r.calls > 0)
        end,
        case when c.is_short and r.stub_calls is not null then r.stub_calls else r.tool_calls end, r.metadata, null::jsonb
    from pycontext._thread_rows(chat_id, source, from_unit, to_unit, act, walked => walked, walked_at => walked_at) r
    cross join lateral (select (is_pruned[r.section_no] and r.stub_tokens < r.frozen_tokens
        and (r.unit_seq = any (kept_units)) is not true) is true as is_short) c
    where r.seq <= hi_seq and (r.superseded_seq is null
        -- the mark says where to look; an act may have set the later result aside
        or case when source is null
            then not pycontext._is_superseded(r.chat_id, r.seq, r.unit_seq, r.tool_call_id, act, hi_seq)
            else r.superseded_seq > hi_seq end)
$$;

-- The rendered rows of the ranges with a stand-in (line_no over 100) for every call whose result has not come, after
-- the unit's other results: where one comes, only what follows it moves.
create or replace function pycontext._closed_rows(
    s pycontext._window_state, from_unit bigint[], to_unit bigint[], is_pruned boolean[])
returns setof pycontext._thread_row
language sql stable
as $$
    with r as materialized (
        select t.* from pycontext._rendered_rows(s.chat_id, s.source, from_unit, to_unit, is_pruned, s.act_arg, s.hi_seq,
            s.turn_seq, s.pin_units || s.border_request || s.prune_request, s.walked, s.walked_at) t
    )
    select r.* from r
    union all
    select r.section_no, r.chat_id, null, s.hi_seq + 1, (100 + e.ordinality)::smallint, 'message', 'tool', r.unit_seq, 16, 16, 16, 0, 0, 0,
        0::smallint, 0::smallint, false, true, false, null, null, 0, null, null, e.value ->> 'id', null, r.created_at,
        null, null, null, to_jsonb(case when r.metadata ->> 'pending' = 'true' then 'waiting for a person' else 'no result yet' end),
        null, null, null
    from r
    cross join lateral jsonb_array_elements(r.tool_calls) with ordinality e
    where r.calls > 0 and not exists (
        select from r t
        where t.unit_seq = r.unit_seq and t.role = 'tool' and t.tool_call_id = e.value ->> 'id')
$$;

-- Texts of one row as it stands, cut to about max_tokens: the beginning and the end of it, and between them
-- what is missing and where it can be read.
create or replace function pycontext._shorten_text(body text, max_tokens integer, seq bigint)
returns text
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_length integer := length(body);
    v_cost integer := greatest(pycontext.estimate_tokens(body), 1);
    v_keep integer;
    v_head text;
    v_tail text;
    v_text text;
    v_marks constant text := '[\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0dff'
        '\u0e31-\u0e4e\u1ab0-\u1aff\u1dc0-\u1dff\u200d\u20d0-\u20ff\ufe00-\ufe0f\ufe20-\ufe2f\U0001f1e6-\U0001f1ff'
        '\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]*';
begin
    if v_cost <= max_tokens then
        return body;
    end if;
    v_keep := floor(0.95 * v_length * greatest(max_tokens - 24, 0) / v_cost);
    while v_keep >= 24 loop
        -- never part a character from its marks, joiners, selectors and tones
        v_head := left(body, v_keep * 3 / 5);
        v_head := left(v_head, -60) || regexp_replace(right(v_head, 60), '.' || v_marks || '(\u200d.' || v_marks || ')*$', '');
        v_tail := regexp_replace(right(body, v_keep - v_keep * 3 / 5),
            '^(\u200d.|.)' || v_marks || '(\u200d.' || v_marks || ')*', '');
        v_text := format(E'%s\n[… %s of %s characters left out, full text is #%s …]\n%s', v_head,
            v_length - length(v_head) - length(v_tail), v_length, seq, v_tail);
        if pycontext.estimate_tokens(v_text) <= max_tokens then
            return v_text;
        end if;
        v_keep := v_keep * 4 / 5;
    end loop;
    return format('[%s characters left out, full text is #%s]', v_length, seq);
end
$$;

-- Shortens the string values inside a JSON value; keys, order and numbers stay.
create or replace function pycontext._shorten_json(j json, max_length integer, seq bigint)
returns json
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
begin
    case json_typeof(j)
        when 'string' then
            if length(j #>> '{}') > max_length then
                return to_json(format('%s [… %s characters left out, #%s]', left(j #>> '{}', max_length),
                    length(j #>> '{}') - max_length, seq));
            end if;
        when 'array' then
            return coalesce((select json_agg(pycontext._shorten_json(e.value, max_length, seq) order by e.ordinality)
                from json_array_elements(j) with ordinality e), '[]');
        when 'object' then
            return (select format('{%s}', string_agg(format('%s:%s', to_json(e.key),
                pycontext._shorten_json(e.value, max_length, seq)), ',' order by e.ordinality))
                from json_each(j) with ordinality e);
        else null;
    end case;
    return j;
end
$$;

-- Arguments of a call, shortened inside the parsed JSON; what does not parse becomes an object that says so.
create or replace function pycontext._shorten_arguments(arguments text, max_tokens integer, seq bigint)
returns text
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_text text;
    v_length integer;
begin
    if pycontext.estimate_tokens(arguments) <= max_tokens then
        return arguments;
    end if;
    foreach v_length in array array[4000, 1000, 250, 60, 12] loop
        begin
            v_text := pycontext._shorten_json(arguments::json, v_length, seq);
        exception when invalid_text_representation or statement_too_complex then
            exit;  -- no JSON, or nested deeper than the stack
        end;
        continue when v_text::jsonb = arguments::jsonb;
        if pycontext.estimate_tokens(v_text) <= max_tokens then
            return v_text;
        end if;
    end loop;
    return format('{"shortened":"%s characters, #%s"}', length(arguments), seq);
end
$$;

-- The largest cap with which the costs fit, no cost being cut below its floor; null where even the floors don't.
create or replace function pycontext._cap(costs integer[], floors integer[], available bigint)
returns integer
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_low integer := 0;
    v_high integer;
    v_mid integer;
    v_sum bigint;
begin
    select coalesce(sum(least(t.cost, t.low)), 0), coalesce(max(t.cost), 0) into v_sum, v_high
    from unnest(costs, floors) t (cost, low);
    if v_sum > available then
        return null;
    end if;
    while v_low < v_high loop
        v_mid := (v_low + v_high + 1) / 2;
        select sum(least(t.cost, greatest(t.low, v_mid))) into v_sum from unnest(costs, floors) t (cost, low);
        if v_sum <= available then
            v_low := v_mid;
        else
            v_high := v_mid - 1;
        end if;
    end loop;
    return v_low;
end
$$;

-- One rendered row cut to a cost: images first, then text, then arguments. Cost and flags are set anew. counted: the
-- count that decides whether it is cut at all (the frozen one where no better count may change what is sent).
create or replace function pycontext._shorten_row(
    r pycontext._thread_row, counted integer, max_tokens integer, image_tokens integer)
returns pycontext._thread_row
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    k record;
    v_room integer;
    v_calls jsonb;
    v_whole pycontext._thread_row;
begin
    if counted <= max_tokens then
        return r;
    end if;
    v_whole := r;
    r.content := pycontext._without_reasoning(r.content);
    r.content := pycontext._without_images(r.content, r.seq);
    if r.tool_calls is not null then
        -- the words get a third, the arguments the rest
        select count(*) into v_room from jsonb_array_elements(r.tool_calls);
        select jsonb_agg(jsonb_set(e.value, '{function,arguments}', to_jsonb(pycontext._shorten_arguments(
            e.value #>> '{function,arguments}',
            greatest(((max_tokens - 4) * case when r.content is null then 1.0 else 0.67 end)::integer / v_room - 20, 16), r.seq)))
            order by e.ordinality)
        into v_calls from jsonb_array_elements(r.tool_calls) with ordinality e;
        r.tool_calls := v_calls;
    end if;
    select * into k from pycontext._count_pieces(null, r.tool_calls, r.role, r.name, image_tokens);
    v_room := max_tokens - k.overhead - pycontext._estimate_pieces(k.texts);
    if r.content is not null then
        r.content := to_jsonb(pycontext._shorten_text(pycontext._content_text(r.content), greatest(v_room, 0), r.seq));
    end if;
    if r.content is not distinct from v_whole.content and r.tool_calls is not distinct from v_whole.tool_calls then
        return v_whole;
    end if;
    select * into k from pycontext._count_pieces(r.content, r.tool_calls, r.role, r.name, image_tokens);
    r.tokens := k.overhead + pycontext._estimate_pieces(k.texts);
    r.encoding := null;
    r.is_plain := false;
    return r;
end
$$;

-- Results that came late, of units before first_unit: no range of #seqs before it names them. Rare.
create or replace function pycontext._late_rows(s pycontext._window_state, first_unit bigint)
returns setof pycontext._thread_row
language sql stable
as $$
    select r.*
    from unnest(s.straddles) q
    cross join lateral pycontext._thread_rows(s.chat_id, null, array[greatest(lower(q) - 1, least(s.marker_from, s.lo_seq + 1))],
        array[first_unit - 1], s.act_arg) r
    where q @> first_unit and r.seq > first_unit and r.seq <= s.hi_seq and (r.superseded_seq is null
        or not pycontext._is_superseded(r.chat_id, r.seq, r.unit_seq, r.tool_call_id, s.act_arg, s.hi_seq))
        and s.source is null
    union all
    select 1, w.*
    from unnest(s.walked) w
    where w.unit_seq < first_unit and w.seq > first_unit and w.seq <= s.hi_seq
        and (w.superseded_seq is null or w.superseded_seq > s.hi_seq)
$$;

-- A result whose call is left out, told as one whose call is not in view: in its own place.
create or replace function pycontext._as_note(r pycontext._thread_row, image_tokens integer)
returns pycontext._thread_row
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    k record;
begin
    r.content := pycontext._rendered(r.content, r.has_fence, true, r.tool_call_id, false);
    r.role := 'user';
    r.unit_seq := r.seq;
    r.tool_call_id := null;
    r.images := 0;
    r.is_plain := true;
    r.encoding := null;
    select * into k from pycontext._count_pieces(r.content, null, r.role, r.name, image_tokens);
    r.tokens := k.overhead + pycontext._estimate_pieces(k.texts);
    return r;
end
$$;

-- What a row may be cut down to at a step: 1 results and images, 2 call arguments too, 3 other text too; pins never.
create or replace function pycontext._floor_of(r pycontext._thread_row, step integer, pin_units bigint[])
returns integer
language sql immutable parallel safe
as $$
    select least(r.tokens, case
        when r.line_no > 0 or r.unit_seq = any (pin_units) then r.tokens
        when step >= 2 and r.calls > 0 then 60 + 60 * r.calls
        when r.calls > 0 and (step < 3 or r.images = 0) then r.tokens
        when r.role = 'tool' or r.images > 0 or step = 3 then 40 + length(coalesce(r.name, '')) / 2
        else r.tokens
    end)
$$;

-- The window where even the tail is too large: results, arguments, then other text of the tail are cut;
-- then head and summary to an eighth of the budget each, then they go, then the oldest units of the tail.
-- PCX05 where the system prompt and the newest request alone do not fit.
create or replace function pycontext._shortened_window(s pycontext._window_state)
returns setof pycontext.window_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_rows pycontext._thread_row[];
    v_cut pycontext._thread_row[];
    v_head pycontext._thread_row[];
    v_pins pycontext._thread_row[];
    r pycontext._thread_row;
    v_request pycontext._thread_row;
    w pycontext.window_row;
    v_prompt integer := coalesce(s.prompt_tokens, 0);
    v_line text := s.line_content #>> '{}';
    v_line_tokens integer := coalesce(s.line_tokens, 0);
    v_eighth integer := s.token_budget / 8;
    v_first bigint := s.first_unit;
    v_from bigint := s.marker_from;
    v_tokens bigint := coalesce(s.marker_tokens, 0);
    v_room bigint;
    v_sum bigint;
    v_slack bigint;
    v_cap integer;
    v_level integer := 0;
    v_step integer;
    v_unit bigint;
    v_gone bigint[];
    v_is_apart boolean;
begin
    s.is_exact := s.act_arg is null and s.is_exact;  -- cuts depend on counts, which get better with time
    -- the newest real user message, verbatim whatever happens
    if s.turn_seq is not null and (s.line_origin = 'reset' and s.turn_seq <= s.line_seq) is not true then
        select t.* into v_request from pycontext._closed_rows(s, array[s.turn_seq], array[s.turn_seq], null) t;
    end if;
    if 3 + v_prompt + coalesce(v_request.tokens, 0) > s.token_budget then
        perform pycontext._raise('PCX05', 'the system prompt and the newest user message alone do not fit',
            format('token_budget is %s, the system prompt takes %s, the newest user message (#%s) takes %s',
                s.token_budget, v_prompt, v_request.seq, coalesce(v_request.tokens, 0)),
            format('the smallest budget that would do is %s',
                ceil((3 + v_prompt + coalesce(v_request.tokens, 0)) * s.token_scale)));
    end if;
    select array_agg(t order by t.unit_seq, t.seq, t.line_no) into v_rows
    from pycontext._closed_rows(s, array[s.first_unit], array[s.hi_seq], null) t;
    -- rows that were set aside leave gaps: the first unit is one that is there
    select coalesce(min(t.unit_seq), v_first) into v_first from unnest(v_rows) t;
    if v_from >= s.first_unit then
        v_from := v_first;
    end if;
    if s.head_to is not null then
        select array_agg(t order by t.unit_seq, t.seq, t.line_no) into v_head
        from pycontext._closed_rows(s, array[s.head_from], array[s.head_to], null) t;
    end if;

    if s.request_seq is not null and s.request_seq is distinct from v_request.seq then
        -- the line's request gives way here: no summary has told it, so the marker does
        v_from := least(v_from, s.request_seq);
    end if;
    if s.pin_units is not null then
        -- a request that is pinned is a pin here like any other
        s.border_request := null;
        s := pycontext._with_pins(s, array(
            select row(t.seq, t.message_id, t.unit_seq, t.to_seq, t.at_act, t.tokens)::pycontext._pin_row
            from pycontext._pins_of(s) t where t.seq <= s.hi_seq), s.first_unit);
    end if;
    if s.pin_from is not null then
        select array_agg(t order by t.unit_seq, t.seq, t.line_no) into v_pins
        from pycontext._closed_rows(s, s.pin_from, s.pin_to, null) t
        where not exists (select from unnest(v_head) h where h.unit_seq = t.unit_seq);
    end if;
    if s.straddles @> s.first_unit then
        v_rows := v_rows || array(
            select pycontext._as_note(t, s.image_tokens) from pycontext._late_rows(s, s.first_unit) t
            where not exists (select from unnest(v_head || v_pins) k where k.unit_seq = t.unit_seq));
    end if;

    <<levels>>
    loop
        v_room := s.token_budget - 3 - v_prompt - v_line_tokens
            - case when v_from < v_first then pycontext._marker_cost(v_from, v_first - 1, greatest(s.total_hi, v_tokens)) else 0 end
            - case when v_request.unit_seq >= v_first or exists (select from unnest(v_head || v_pins) t where t.seq = v_request.seq)
                then 0 else coalesce(v_request.tokens, 0) end
            - (select coalesce(sum(t.tokens), 0) from unnest(v_head || v_pins) t)
            - case when s.straddles @> v_first then 36 * (
                select count(*) from pycontext._late_rows(s, v_first) t
                where not exists (select from unnest(v_rows) k where k.seq = t.seq and k.unit_seq >= v_first)) else 0 end;
        v_slack := 0;
        v_step := 1;
        while v_step <= 3 loop
            v_cap := pycontext._cap(
                array(select t.tokens from unnest(v_rows) t where t.unit_seq >= v_first and t.seq is distinct from v_request.seq
                    order by t.unit_seq, t.seq, t.line_no),
                array(select pycontext._floor_of(t, v_step, s.pin_units) from unnest(v_rows) t
                    where t.unit_seq >= v_first and t.seq is distinct from v_request.seq
                    order by t.unit_seq, t.seq, t.line_no),
                v_room - v_slack - case when v_request.unit_seq >= v_first then v_request.tokens else 0 end);
            if v_cap is null then
                v_step := v_step + 1;
                v_slack := 0;
                continue;
            end if;
            v_cut := array(
                select case when t.seq = v_request.seq or pycontext._floor_of(t, v_step, s.pin_units) = t.tokens then t
                    else pycontext._shorten_row(t, t.tokens, greatest(v_cap, pycontext._floor_of(t, v_step, s.pin_units)), s.image_tokens) end
                from unnest(v_rows) t where t.unit_seq >= v_first order by t.unit_seq, t.seq, t.line_no);
            select coalesce(sum(t.tokens), 0) into v_sum from unnest(v_cut) t;
            exit levels when v_sum <= v_room;
            v_slack := v_slack + v_sum - v_room;  -- a cut that did not come out as small as asked
        end loop;

        v_level := v_level + 1;
        if v_level = 1 then
            -- what is pinned of the head stays whole
            v_pins := v_pins || array(select t from unnest(v_head) t where t.unit_seq = any (s.pin_units));
            v_head := array(select t from unnest(v_head) t where (t.unit_seq = any (s.pin_units)) is not true);
            if v_head <> '{}' then
                v_head := array(
                    select case when t.seq = v_request.seq or t.line_no > 0 then t
                        else pycontext._shorten_row(t, t.tokens, v_eighth / cardinality(v_head), s.image_tokens) end
                    from unnest(v_head) t order by t.unit_seq, t.seq, t.line_no);
            end if;
            if v_line_tokens > v_eighth then
                v_line := pycontext._shorten_text(v_line, greatest(v_eighth - 60, 0), s.line_seq);
                v_line_tokens := 4 + pycontext.estimate_tokens(
                    pycontext._line_text(s.line_origin, s.line_covers_from, s.line_seq, v_line));
            end if;
        elsif v_level = 2 then
            if v_head <> '{}' then
                v_from := least(v_from, (select min(t.seq) from unnest(v_head) t where t.line_no = 0));
                v_tokens := v_tokens + coalesce(s.head_frozen, 0);
            end if;
            v_head := null;
        elsif v_level = 3 then
            if s.line_origin = 'compaction' then
                v_from := s.line_covers_from;
                v_line := null;
                v_line_tokens := 0;
            end if;
        elsif exists (select from unnest(v_rows) t where t.unit_seq >= v_first) then
            v_from := coalesce(v_from, v_first);
            if v_first = any (s.pin_units) and v_first is distinct from v_request.unit_seq then
                v_pins := v_pins || array(select t from unnest(v_rows) t where t.unit_seq = v_first);
            else
                select v_tokens + sum(t.tokens) into v_tokens from unnest(v_rows) t where t.unit_seq = v_first;
            end if;
            select coalesce(min(t.unit_seq), s.hi_seq + 1) into v_first from unnest(v_rows) t where t.unit_seq > v_first;
        elsif v_pins <> '{}' then
            -- the oldest pins give way first; none too many: where the marker starts anew it may take less
            select array_agg(q.unit_seq), least(v_from, min(q.unit_seq)), v_tokens + sum(q.tokens)
            into v_gone, v_from, v_tokens
            from (
                select t.unit_seq, t.tokens, sum(t.tokens) over (order by t.place) - t.tokens as before
                from (
                    select p.unit_seq, sum(p.tokens) as tokens, array_position(s.pin_units, p.unit_seq) as place
                    from unnest(v_pins) p group by p.unit_seq) t) q
            where q.before = 0 or q.before < -v_room - 12;
            v_pins := array(select t from unnest(v_pins) t where (t.unit_seq = any (v_gone)) is not true);
        else
            v_from := v_first;  -- not even a marker fits
            v_line := null;
            v_cut := null;
            exit levels;
        end if;
    end loop;

    w.ordinal := 0;
    if s.prompt is not null then
        w := pycontext._prompt_row(s);
        return next w;
    end if;
    if v_line is not null and s.line_origin = 'reset' then
        w := pycontext._line_row(w.ordinal + 1, s, v_line, v_line_tokens);
        return next w;
    end if;
    foreach r in array coalesce(v_head, '{}') loop
        w := pycontext._window_row(w.ordinal + 1, 'head', r, s.is_exact);
        return next w;
    end loop;
    v_is_apart := v_request.unit_seq < v_first
        and not exists (select from unnest(v_head || v_pins) t where t.seq = v_request.seq);
    for r in
        select t.* from unnest(v_pins) t
        where (v_is_apart and t.unit_seq > v_request.seq) is not true order by t.unit_seq, t.seq, t.line_no
    loop
        w := pycontext._window_row(w.ordinal + 1, 'pinned', r, s.is_exact);
        return next w;
    end loop;
    if v_line is not null and s.line_origin = 'compaction' then
        w := pycontext._line_row(w.ordinal + 1, s, v_line, v_line_tokens);
        return next w;
    end if;
    v_unit := pycontext._marker_end(s, v_from, v_first, array(select t.seq from unnest(v_head || v_pins) t) || v_request.seq);
    if v_from <= v_unit then
        -- all of the range, but for what is shown of it; of an adopted chat as much as was read
        if s.source is null then
            v_tokens := coalesce((pycontext._first_unit(s, v_first)).start_total, s.total_hi)
                - (select t.running_total - t.frozen_tokens from pycontext._row_at(s, v_from) t)
                - (select coalesce(sum(t.frozen_tokens), 0) from unnest(v_head || v_pins) t
                    where t.seq between v_from and v_first - 1);
            if v_request.seq between v_from and v_first - 1 and not exists (
                select from unnest(v_head || v_pins) t where t.seq = v_request.seq) then
                v_tokens := v_tokens - v_request.frozen_tokens;
            end if;
        else
            v_tokens := least(v_tokens, (
                select coalesce(sum(q.frozen_tokens), 0) from unnest(s.walked) q
                where q.seq between v_from and v_unit and q.seq is distinct from v_request.seq
                    and not exists (select from unnest(v_head || v_pins) t where t.seq = q.seq)));
        end if;
        w := pycontext._marker_row(w.ordinal + 1, v_from, v_unit, greatest(v_tokens, 0), s.source is not null, s.is_exact);
        return next w;
    end if;
    if s.straddles @> v_first and v_from < v_first then
        for r in
            select t.* from pycontext._late_rows(s, v_first) t
            where not exists (select from unnest(v_head || v_pins) k where k.unit_seq = t.unit_seq)
                and not exists (select from unnest(v_rows) k where k.seq = t.seq and k.unit_seq >= v_first)
            order by t.seq
        loop
            w := pycontext._marker_row(w.ordinal + 1, r.seq, r.seq, r.frozen_tokens, false, s.is_exact);
            return next w;
        end loop;
    end if;
    if v_is_apart then
        w := pycontext._window_row(w.ordinal + 1, 'request', v_request, s.is_exact);
        return next w;
        for r in
            select t.* from unnest(v_pins) t where t.unit_seq > v_request.seq order by t.unit_seq, t.seq, t.line_no
        loop
            w := pycontext._window_row(w.ordinal + 1, 'pinned', r, s.is_exact);
            return next w;
        end loop;
    end if;
    foreach r in array coalesce(v_cut, '{}') loop
        w := pycontext._window_row(w.ordinal + 1, 'tail', r, s.is_exact);
        return next w;
    end loop;
end
$$;

create or replace function pycontext._window_row(
    ordinal integer, section text, r pycontext._thread_row, is_exact boolean)
returns pycontext.window_row
language sql immutable parallel safe
as $$
    select ordinal, section, r.message_id, case when r.line_no = 0 then r.seq end, r.kind, r.role, r.content, r.tool_calls, r.tool_call_id, r.name,
        r.tokens, r.encoding is null, not r.is_plain, r.has_fence, r.created_at, is_exact
$$;

-- What a marker takes: 4 for the message, its words, a token for every three digits.
create or replace function pycontext._marker_cost(from_seq bigint, to_seq bigint, tokens bigint)
returns integer
language sql immutable parallel safe
as $$
    select case when from_seq > to_seq then 0 else 28 end + (length(from_seq::text) + 2) / 3 + (length(to_seq::text) + 2) / 3 + (length(tokens::text) + 2) / 3
$$;

-- Rows of a window that no message stands behind: one expression each, so that it costs no call.
create or replace function pycontext._marker_row(
    ordinal integer, from_seq bigint, to_seq bigint, tokens bigint, is_partial boolean, is_exact boolean)
returns pycontext.window_row
language sql immutable parallel safe
as $$
    select row(ordinal, 'omitted', null, to_seq, 'message', 'user',
        to_jsonb(pycontext._marker_text(from_seq, to_seq, tokens, is_partial)), null, null, null,
        pycontext._marker_cost(from_seq, to_seq, tokens), true, true, false, null, is_exact)::pycontext.window_row
$$;

create or replace function pycontext._line_row(ordinal integer, s pycontext._window_state, body text, tokens integer)
returns pycontext.window_row
language sql immutable parallel safe
as $$
    select row(ordinal, 'summary', s.line_id, s.line_seq, 'summary', 'user',
        to_jsonb(pycontext._line_text(s.line_origin, s.line_covers_from, s.line_seq, body)), null, null, null, tokens,
        s.line_encoding is null or body is distinct from s.line_content #>> '{}',
        body is distinct from s.line_content #>> '{}', false, s.line_created_at, s.is_exact)::pycontext.window_row
$$;

create or replace function pycontext._prompt_row(s pycontext._window_state)
returns pycontext.window_row
language sql immutable parallel safe
as $$
    select row(1, 'system', null, null, 'message', 'system', to_jsonb(s.prompt), null, null, null, s.prompt_tokens,
        s.prompt_encoding is null, false, false, s.prompt_created_at, s.is_exact)::pycontext.window_row
$$;

-- The rows of the ranges, rendered, among the rows that were made: place[i] is the range that extra[i] follows.
create or replace function pycontext._section_rows(
    s pycontext._window_state, sections text[], from_unit bigint[], to_unit bigint[], is_pruned boolean[],
    extra pycontext.window_row[], place integer[])
returns setof pycontext.window_row
language sql stable
as $$
    select (row_number() over (order by q.place, q.first_sort, q.second_sort))::integer, q.section, q.message_id, q.seq,
        q.kind, q.role, q.content, q.tool_calls, q.tool_call_id, q.name, q.tokens, q.is_estimate, q.is_shortened,
        q.is_escaped, q.created_at, s.is_exact
    from (
        select 2 * r.section_no as place, r.unit_seq as first_sort, r.seq as second_sort, sections[r.section_no] as section,
            r.message_id, r.seq, r.kind, r.role, r.content, r.tool_calls, r.tool_call_id, r.name, r.tokens,
            r.encoding is null as is_estimate, not r.is_plain as is_shortened, r.has_fence as is_escaped, r.created_at
        from pycontext._rendered_rows(s.chat_id, s.source, from_unit, to_unit, is_pruned, s.act_arg, s.hi_seq,
            s.turn_seq, s.pin_units || s.border_request || s.prune_request, s.walked, s.walked_at) r
        union all
        select 2 * e.at + 1, e.n, 0, e.section, e.message_id, e.seq, e.kind, e.role, e.content, e.tool_calls,
            e.tool_call_id, e.name, e.tokens, e.is_estimate, e.is_shortened, e.is_escaped, e.created_at
        from rows from (unnest(extra), unnest(place)) with ordinality e (ordinal, section, message_id, seq, kind, role,
            content, tool_calls, tool_call_id, name, tokens, is_estimate, is_shortened, is_escaped, created_at, is_exact,
            at, n)) q
$$;

-- The same with stand-ins for results that have not come, and the head cut to its limit where it must be.
create or replace function pycontext._closed_section_rows(
    s pycontext._window_state, sections text[], from_unit bigint[], to_unit bigint[], is_pruned boolean[],
    extra pycontext.window_row[], place integer[])
returns setof pycontext.window_row
language sql stable
as $$
    select (row_number() over (order by q.place, q.first_sort, q.second_sort, q.third_sort))::integer, q.section,
        q.message_id, q.seq, q.kind, q.role, q.content, q.tool_calls, q.tool_call_id, q.name, q.tokens, q.is_estimate,
        q.is_shortened, q.is_escaped, q.created_at, s.is_exact
    from (
        select 2 * t.section_no as place, t.unit_seq as first_sort, t.seq as second_sort, t.line_no as third_sort, x.*
        from pycontext._closed_rows(s, from_unit, to_unit, is_pruned) t
        cross join lateral pycontext._window_row(null, sections[t.section_no],
            case when s.is_head_cut and sections[t.section_no] = 'head'
                -- of an adopted chat it is one row, and the line remembers what that took
                then pycontext._shorten_row(t, case when s.source is null then t.frozen_tokens
                    else greatest(t.frozen_tokens, s.head_tokens + 1) end, s.head_tokens, s.image_tokens) else t end, s.is_exact) x
        union all
        select 2 * e.at + t.is_between, case t.is_between when 1 then e.n else e.seq end, e.seq, 0, e.ordinal, e.section,
            e.message_id, e.seq, e.kind, e.role, e.content, e.tool_calls, e.tool_call_id, e.name, e.tokens, e.is_estimate,
            e.is_shortened, e.is_escaped, e.created_at, e.is_exact
        from rows from (unnest(extra), unnest(place)) with ordinality e (ordinal, section, message_id, seq, kind, role,
            content, tool_calls, tool_call_id, name, tokens, is_estimate, is_shortened, is_escaped, created_at, is_exact,
            at, n)
        cross join lateral (select (e.section <> 'tail')::integer as is_between) t) q
$$;

-- The messages the model really reads, oldest first, within token_budget (null: the profile's). as_of: a message
-- id, for the window as it was then. PCX01 no such chat; PCX05 budget below system prompt + newest request.
create or replace function pycontext.working_window(
    chat_id text, token_budget integer default null, as_of text default null)
returns setof pycontext.window_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set max_parallel_workers_per_gather = 0
as $$
declare
    s pycontext._window_state := pycontext._window_state(chat_id, token_budget, as_of);
    v_from bigint[] := '{}';
    v_to bigint[] := '{}';
    v_sections text[] := '{}';
    v_pruned boolean[] := '{}';
    v_extra pycontext.window_row[] := '{}';
    v_place integer[] := '{}';
    v_first bigint;
    v_whole bigint;
    v_tokens bigint;
    v_late_rows pycontext._thread_row[] := '{}';
    v_pins integer := coalesce(cardinality(s.pin_from), 0);
    v_early integer := v_pins;
    v_late integer := v_pins;
begin
    if s.mode = 'shorten' then
        return query select * from pycontext._shortened_window(s);
        return;
    end if;
    if v_pins > 0 then
        -- a pin from after a request that stands apart stands after it, too
        select count(*) filter (where u < coalesce(case when s.line_origin = 'compaction' then s.request_seq end, r.seq, u + 1)),
            count(*) filter (where u < coalesce(r.seq, u + 1))
        into v_early, v_late
        from unnest(s.pin_from) u, (select case when s.mode = 'omit' then s.border_request end as seq) r;
    end if;
    -- in the order of the window: ranges to read, and the rows made here with the range each one follows
    if s.prompt is not null then
        v_extra := array[pycontext._prompt_row(s)];
        v_place := array[0];
    end if;
    if s.line_origin = 'reset' then
        v_extra := v_extra || pycontext._line_row(null, s, s.line_content #>> '{}', s.line_tokens);
        v_place := v_place || 0;
    end if;
    if s.head_to is not null then
        v_from := array[s.head_from];
        v_to := array[s.head_to];
        v_sections := array['head'];
        v_pruned := array[false];
    end if;
    if v_early > 0 then
        v_from := v_from || s.pin_from[:v_early];
        v_to := v_to || s.pin_to[:v_early];
        v_sections := v_sections || array_fill('pinned'::text, array[v_early]);
        v_pruned := v_pruned || array_fill(false, array[v_early]);
    end if;
    if s.line_origin = 'compaction' then
        v_extra := v_extra || pycontext._line_row(null, s, s.line_content #>> '{}', s.line_tokens);
        v_place := v_place || cardinality(v_from);
        if s.request_seq is not null then
            v_from := v_from || s.request_seq;
            v_to := v_to || s.request_seq;
            v_sections := v_sections || 'request'::text;
            v_pruned := v_pruned || false;
        end if;
    end if;
    if v_early < v_late then
        v_from := v_from || s.pin_from[v_early + 1:v_late];
        v_to := v_to || s.pin_to[v_early + 1:v_late];
        v_sections := v_sections || array_fill('pinned'::text, array[v_late - v_early]);
        v_pruned := v_pruned || array_fill(false, array[v_late - v_early]);
    end if;
    if s.mode = 'omit' and s.marker_from <= s.marker_to then
        v_extra := v_extra || pycontext._marker_row(null, s.marker_from, s.marker_to, s.marker_tokens,
            s.source is not null, s.is_exact);
        v_place := v_place || cardinality(v_from);
    end if;
    v_first := case when s.mode = 'omit' then s.first_unit else s.lo_seq + 1 end;
    v_whole := case when s.mode = 'prune' then s.first_unit when s.prune_unit > v_first then s.prune_unit else v_first end;
    -- a result that came late may stand behind the border, or in a head that what is left out stands before
    if s.mode = 'omit' and (s.straddles @> s.first_unit or s.marker_to < s.head_from and s.straddles @> s.head_from) then
        s.has_open := true;
        v_late_rows := array(
            select row(r.*)::pycontext._thread_row
            from (
                select l.* from pycontext._late_rows(s, s.first_unit) l
                union
                select l.* from pycontext._late_rows(s, s.head_from) l where s.marker_to < s.head_from) r
            where (r.unit_seq between s.head_from and s.head_to or r.unit_seq = any (s.pin_units)) is not true order by r.seq);
        v_extra := v_extra || array(
            select pycontext._marker_row(null, r.seq, r.seq, r.frozen_tokens, false, s.is_exact)
            from unnest(v_late_rows) r where r.seq < v_whole);
        v_place := v_place || array_fill(cardinality(v_from), array[cardinality(v_extra) - cardinality(v_place)]);
    end if;
    if s.mode = 'omit' and s.border_request is not null then
        v_from := v_from || s.border_request;
        v_to := v_to || s.border_request;
        v_sections := v_sections || 'request'::text;
        v_pruned := v_pruned || false;
    end if;
    if v_late < v_pins then
        v_from := v_from || s.pin_from[v_late + 1:];
        v_to := v_to || s.pin_to[v_late + 1:];
        v_sections := v_sections || array_fill('pinned'::text, array[v_pins - v_late]);
        v_pruned := v_pruned || array_fill(false, array[v_pins - v_late]);
    end if;
    if v_whole > v_first then
        v_from := v_from || v_first;
        v_to := v_to || (v_whole - 1);
        v_sections := v_sections || 'tail'::text;
        v_pruned := v_pruned || true;
    end if;
    v_sections := v_sections || 'tail'::text;
    v_from := v_from || v_whole;
    v_to := v_to || s.hi_seq;
    v_pruned := v_pruned || false;
    if v_late_rows <> '{}' then
        -- what is as fresh as the verbatim rows is told among them: mostly it is what the turn goes on from
        v_extra := v_extra || array(
            select pycontext._window_row(null, 'tail', pycontext._as_note(r, s.image_tokens), s.is_exact)
            from unnest(v_late_rows) r where r.seq >= v_whole);
        v_place := v_place || array_fill(cardinality(v_from), array[cardinality(v_extra) - cardinality(v_place)]);
    end if;
    if s.has_open or s.is_head_cut then
        -- stand-ins are known once the rows are read: where they do not fit, the tail is cut
        select array_agg(r order by r.ordinal), sum(r.tokens) into v_extra, v_tokens
        from pycontext._closed_section_rows(s, v_sections, v_from, v_to, v_pruned, v_extra, v_place) r;
        if v_tokens + 3 > s.token_budget then
            s.first_unit := v_first;
            s.marker_tokens := s.marker_tokens
                + coalesce((select r.frozen_tokens from pycontext._row_at(s, s.border_request) r), 0);
            return query select * from pycontext._shortened_window(s);
        else
            return query select * from unnest(v_extra);
        end if;
    else
        return query select * from pycontext._section_rows(s, v_sections, v_from, v_to, v_pruned, v_extra, v_place);
    end if;
end
$$;
