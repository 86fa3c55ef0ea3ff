-- What start_turn counted last, so that a provider's count can be held against it; and how far each model's counts were
-- off, as learned from that. The newest model's scale is taken over at the next pass.
alter table pycontext.chat
    add column read_seq bigint,
    add column read_act bigint,
    add column read_tokens integer,
    add column model text,
    add column scales jsonb not null default '{}';

-- These take more arguments now.
drop function if exists pycontext._anthropic_blocks(jsonb);
drop function if exists pycontext._anthropic_of(pycontext.window_row[], text);
