-- What the provider counted, held against what was counted here: token_scale is learned per model.

create or replace view pycontext.usage_row as
select
    null::text as model, null::numeric as token_scale, null::numeric as next_token_scale, null::boolean as is_taken,
    null::text as reason
where false;

-- Takes a provider's count of a prompt. Up at once, down by a tenth of the difference, within 0.75 to 2 times the profile's
-- scale. Usage of another window than the one that start_turn counted last is not taken. PCX01, PCX02.
create or replace function pycontext.record_usage(
    chat_id text, model text, prompt_tokens integer, seq bigint default null)
returns setof pycontext.usage_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c pycontext.chat;
    r pycontext.usage_row;
    v_own numeric;
    v_ratio numeric;
begin
    if coalesce(model, '') !~ '\S' or length(model) > 200 or coalesce(prompt_tokens, 0) <= 0 then
        perform pycontext._raise('PCX02', 'usage needs a model and its count of the prompt',
            format('model is %L, prompt_tokens is %s', left(model, 200), coalesce(prompt_tokens::text, 'null')),
            'pass what the provider returned: its model, and all tokens of the prompt, cached ones included');
    end if;
    c := pycontext._lock_chat(chat_id, false);
    select p.token_scale into v_own from pycontext.profile p where p.profile = c.profile;
    r.model := model;
    r.token_scale := c.token_scale;
    r.next_token_scale := coalesce((c.scales ->> model)::numeric, v_own);
    v_ratio := prompt_tokens::numeric / nullif(c.read_tokens, 0);
    r.reason := case
        when c.read_tokens is null then 'no window was counted yet: start_turn does'
        when seq <> c.read_seq then format('of another window: it ends at #%s, the one counted last at #%s', seq, c.read_seq)
        when c.read_act <> c.act_no then 'of another window: an act has changed the chat since'
        when c.read_tokens < 1000 then format('a window of %s tokens is too small to tell', c.read_tokens)
        when v_ratio not between v_own / 3 and v_own * 3 then
            format('%s tokens can''t be of the %s that were counted', prompt_tokens, c.read_tokens)
    end;
    r.is_taken := r.reason is null;
    if r.is_taken then
        r.next_token_scale := round(least(greatest(case when v_ratio > r.next_token_scale then v_ratio
            else r.next_token_scale + (v_ratio - r.next_token_scale) / 10 end, v_own * 0.75, 0.5), v_own * 2, 4), 4);
        r.reason := format('%s tokens, of which %s were counted', prompt_tokens, c.read_tokens);
        update pycontext.chat t
        -- a few models a chat are plenty
        set model = record_usage.model, scales = case when (select count(*) from jsonb_object_keys(c.scales)) < 20
            then c.scales else '{}' end || jsonb_build_object(record_usage.model, r.next_token_scale)
        where t.chat_id = c.chat_id;
    end if;
    return next r;
end
$$;

-- A pass takes over the scale learned for the chat's model: nothing else moves it, so borders stand still between passes.
create or replace function pycontext._take_scale(chat_id text)
returns void
language sql volatile
as $$
    update pycontext.chat c
    set token_scale = (c.scales ->> c.model)::numeric
    from pycontext.profile p
    where c.chat_id = _take_scale.chat_id and p.profile = c.profile
        and abs((c.scales ->> c.model)::numeric - c.token_scale) > 0.01 * c.token_scale
        and pycontext._budget(p, c.tool_tokens, (c.scales ->> c.model)::numeric) > 0
$$;

comment on view pycontext.usage_row is 'Row type of record_usage. Never holds rows itself.';
comment on column pycontext.usage_row.model is 'The model.';
comment on column pycontext.usage_row.token_scale is 'What the chat''s budget is divided by now.';
comment on column pycontext.usage_row.next_token_scale is 'What has been learned for the model: taken over at the next pass.';
comment on column pycontext.usage_row.is_taken is 'False: this usage taught nothing; reason says why.';
comment on column pycontext.usage_row.reason is 'What was compared, or why it was not.';
comment on function pycontext.record_usage(text, text, integer, bigint) is
    'Takes a provider''s count of the prompt that was just sent, cached tokens included, and learns the model''s token_scale '
    'from it: up at once, down slowly, within 0.75 to 2 times the profile''s. The chat takes it over at its next compaction '
    'pass; window_status shows both. seq: the read_seq that start_turn returned with what was sent. Usage of another window '
    'than the one that start_turn counted last, or of one under 1,000 tokens, is not taken, and the row says why. Errors: '
    'PCX01, PCX02.';
comment on function pycontext._take_scale(text) is 'Takes over the token_scale that was learned for the chat''s model.';
comment on column pycontext.chat.read_seq is 'Newest seq of the window that start_turn read last.';
comment on column pycontext.chat.read_act is 'act_no at that read.';
comment on column pycontext.chat.read_tokens is 'Tokens counted for that request: window, memory and tool schemas.';
comment on column pycontext.chat.model is 'Model of the newest usage that was recorded.';
comment on column pycontext.chat.scales is 'token_scale as learned from recorded usage, by model.';
