-- What merged texts are made of: each line keeps the summary of its own messages alone.

create or replace view pycontext.line_segment_row as
select null::bigint as seq, null::text as message_id, null::boolean as is_segment, null::jsonb as summary
where false;
comment on view pycontext.line_segment_row is 'Row type of line_segments.';
comment on column pycontext.line_segment_row.seq is 'Message the line follows.';
comment on column pycontext.line_segment_row.message_id is 'The line.';
comment on column pycontext.line_segment_row.is_segment is
    'True: the summary tells the messages of this line alone; false: those of all lines before it, too.';
comment on column pycontext.line_segment_row.summary is 'The segment, or the merged summary where there is none.';

-- The chain of lines that a summary after M continues, oldest first: the newest line before M, the line that one was merged
-- with, and so on back to a reset. It ends early, with a merged summary, at a line without a segment (redacted, or put without
-- one) and after max_lines. M null: as if it were the newest message. PCX01, PCX02.
create or replace function pycontext.line_segments(
    chat_id text, after_message_id text default null, max_lines integer default 32)
returns setof pycontext.line_segment_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state := pycontext._chat_bounds(chat_id);
    l pycontext.message := pycontext._line_before(chat_id, least(s.stale_seq,
        case when after_message_id is null then 4611686018427387904 else pycontext._place_of(s, after_message_id) end));
    r pycontext.line_segment_row;
    v_found pycontext.line_segment_row[] := '{}';
begin
    while l.origin = 'compaction' loop
        r := row(l.seq, l.message_id, l.segment is not null and cardinality(v_found) + 1 < max_lines, l.segment);
        if not r.is_segment then
            r.summary := l.summary;
        end if;
        v_found := r || v_found;
        exit when not r.is_segment;
        -- what stood before it when it was made
        select m.* into l from pycontext.message m
        where m.chat_id = s.chat_id and m.line_no > 0 and m.gone_act is null and m.seq < l.seq and m.at_act < l.at_act
        order by m.seq desc, m.origin = 'reset' desc, m.line_no desc limit 1;
    end loop;
    return query select * from unnest(v_found);
end
$$;
comment on function pycontext.line_segments(text, text, integer) is
    'The segments that the next summary after M is merged with, oldest first; the oldest row may be a merged summary of all '
    'before it (is_segment false). Reads the newest max_lines lines. PCX01, PCX02.';
