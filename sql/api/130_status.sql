create or replace function pycontext.schema_version()
returns text
language sql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
    select '0.1.0.dev0'
$$;

-- One chat in one row: its limits, what its window takes now, its newest line.
create or replace function pycontext.window_status(chat_id text)
returns setof pycontext.window_status_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s pycontext._window_state := pycontext._chat_state(chat_id, null, null);
    v_rows pycontext.window_row[] := pycontext._window_array(chat_id, null, null);
    r pycontext.window_status_row;
begin
    r.chat_id := s.chat_id;
    r.profile := s.profile;
    r.encoding := s.encoding;
    r.token_scale := s.token_scale;
    r.token_budget := s.token_budget;
    select 3 + sum(w.tokens), pycontext._is_degraded(chat_id, v_rows) into r.window_tokens, r.is_degraded
    from unnest(v_rows) w;
    select p.trigger_tokens into r.trigger_tokens from pycontext.compaction_plan(chat_id) p;
    r.messages := case when s.source is null then s.hi_seq end;
    r.last_seq := s.hi_seq;
    r.line_id := s.line_id;
    r.line_seq := s.line_seq;
    r.line_origin := s.line_origin;
    r.uncounted := case when s.source is null then (
        select count(*) from (
            select from pycontext.message m
            where m.chat_id = window_status.chat_id and m.encoding is null limit 10000) u) end;
    r.act_no := s.act_no;
    r.edit_no := s.edit_no;
    select c.model, (c.scales ->> c.model)::numeric into r.model, r.next_token_scale
    from pycontext.chat c where c.chat_id = s.chat_id;
    return next r;
end
$$;

-- The state of the installation over all chats: a row a finding, with what to do about it. Looks at no content, but in
-- the 100 adopted chats that changed last: what those hold is not known without reading them.
create or replace function pycontext.status()
returns setof pycontext.finding_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_chat record;
    v_count bigint;
    v_tokens integer;
    v_adopted bigint := 0;
    v_over jsonb := '{}';
    v_uncounted jsonb := '{}';
    v_stale jsonb := '{}';
    v_broken jsonb := '{}';
begin
    for v_chat in
        select t.chat_id, t.line_seq from pycontext.chat t
        where t.source is not null order by t.updated_at desc, t.chat_id limit 100
    loop
        v_adopted := v_adopted + 1;
        begin  -- one broken view must not hide the rest
            select p.window_tokens - p.token_budget into v_tokens from pycontext.compaction_plan(v_chat.chat_id) p;
            if v_tokens > 0 then
                v_over := v_over || jsonb_build_object(v_chat.chat_id, v_tokens);
            end if;
            select count(*) into v_count from pycontext.working_window(v_chat.chat_id) w
            where w.is_estimate and w.section <> 'omitted';
            if v_count > 0 then
                v_uncounted := v_uncounted || jsonb_build_object(v_chat.chat_id, v_count);
            end if;
            if v_chat.line_seq is not null then
                select count(*) into v_count from pycontext._stale_lines(v_chat.chat_id);
                if v_count > 0 then
                    v_stale := v_stale || jsonb_build_object(v_chat.chat_id, v_count);
                end if;
            end if;
        exception when others then
            v_broken := v_broken || jsonb_build_object(v_chat.chat_id, sqlerrm);
        end;
    end loop;
    return query
    select 'info', 'schema', format('version %s, PostgreSQL %s', pycontext.schema_version(),
        current_setting('server_version')), null::text
    union all
    select 'info', 'chats', format('%s chats, %s messages kept here', (select count(*) from pycontext.chat),
        (select coalesce(sum(c.last_seq), 0) from pycontext.chat c where c.source is null)), null
    union all
    select 'warning', 'uncounted rows', format('%s rows in %s chats are estimated, not counted', sum(u.n), count(*)),
        'the worker counts them; or db.count_tokens(chat_id)'
    from (
        select count(*) as n from pycontext.message m
        where m.encoding is null and m.gone_act is null and not v_uncounted ? m.chat_id
        group by m.chat_id
        union all
        select e.value::bigint from jsonb_each_text(v_uncounted) e) u
    having count(*) > 0
    union all
    select 'error', 'failed compactions', format('%s chats have a failed last pass, newest: %s', count(*),
        (array_agg(f.reason order by f.created_at desc))[1]),
        'see: select * from pycontext.compaction_history where outcome = ''failed'''
    from (
        select distinct on (p.chat_id) p.chat_id, p.outcome, p.reason, p.created_at
        from pycontext.pass p order by p.chat_id, p.pass_no desc) f
    where f.outcome = 'failed'
    having count(*) > 0
    union all
    select 'error', 'failed flushes', format('%s chats whose facts could not be taken, newest: %s', count(*),
        (array_agg(c.flush_error order by c.flush_failed_at desc))[1]),
        'their compaction waits for it: mend the extractor, or set_profile(…, flush_mode => ''optional'')'
    from pycontext.chat c
    where c.flush_error is not null
    having count(*) > 0
    union all
    select 'warning', 'chats over budget', format('%s chats hold more than their budget; the oldest part is pruned or left out: %s%s',
        count(*), string_agg(o.chat_id, ', ' order by o.over desc) filter (where o.n <= 3), case when count(*) > 3 then ', …' else '' end),
        'compact them: db.compact(chat_id), pycontext compact CHAT, or run the worker'
    from (
        select t.chat_id, t.over, row_number() over (order by t.over desc) as n
        from (
            select c.chat_id, c.live_tokens - pycontext._budget(p, c.tool_tokens, c.token_scale) as over
            from pycontext.chat c
            join pycontext.profile p on p.profile = c.profile
            where c.source is null
            union all
            select e.key, e.value::integer from jsonb_each_text(v_over) e) t
        where t.over > 0) o
    having count(*) > 0
    union all
    select 'warning', 'stale lines', format('%s lines of adopted chats no longer tell what their messages say: %s',
        sum(e.value::bigint), string_agg(e.key, ', ')),
        'drop them, the next compaction makes them anew: select pycontext.source_changed(chat_id)'
    from jsonb_each_text(v_stale) e
    having count(*) > 0
    union all
    select 'error', 'unreadable chats', format('%s adopted chats cannot be read, %s: %s', count(*), (array_agg(e.key))[1],
        (array_agg(e.value))[1]),
        'mend the view, or raise the budget: select * from pycontext.source; select * from pycontext.working_window(chat_id)'
    from jsonb_each_text(v_broken) e
    having count(*) > 0
    union all
    select 'warning', 'expired leases', format('%s compactions began and never ended: %s', count(*),
        (array_agg(e.chat_id order by e.expires_at))[1:3]),
        'a process died or hangs; whoever comes next takes over: pycontext compact CHAT'
    from pycontext.lease e
    where e.holder is not null and e.expires_at < statement_timestamp()
    having count(*) > 0
    union all
    select 'error', 'broken source', format('%s cannot be read: %s', s.source, x.fault),
        'make the view again as it was, or register it anew: select pycontext.register_source(name, relation)'
    from pycontext.source s
    cross join lateral (select case when s.chat_type is not null then pycontext._source_fault(s) end as fault) x
    where x.fault is not null
    union all
    select 'info', 'source', format('%s reads %s%s', s.source, s.relation, case when s.is_default
        then ', for every chat id without a row of its own' else '' end), null
    from pycontext.source s
    union all
    select 'info', 'adopted chats', format('%s with a row here; looked into the %s that changed last', count(*), v_adopted), null
    from pycontext.chat a
    where a.source is not null
    having count(*) > v_adopted;
end
$$;
