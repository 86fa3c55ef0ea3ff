-- Messages that people pinned. A pin stays as a row when it is taken off or set aside with its message (gone_act),
-- so that a replay finds it. All pins of a chat are one range of the primary key, and few.
create table pycontext.pin (
    chat_id text collate "C" not null,
    seq bigint not null,
    at_act bigint not null,
    gone_act bigint,
    unit_seq bigint not null,
    to_seq bigint not null,
    tenant text collate "C" not null default '',
    message_id text collate "C" not null,
    created_at timestamptz not null default now(),
    constraint pin_pk primary key (chat_id, seq, at_act),
    constraint pin_chat_fk foreign key (chat_id) references pycontext.chat (chat_id)
);

-- How many live pins a chat has: a window of a chat without any looks no further.
alter table pycontext.chat add column pins integer not null default 0;

-- The act that erased a row, or took an erased row's words out of a line.
alter table pycontext.message add column redacted_act bigint;
