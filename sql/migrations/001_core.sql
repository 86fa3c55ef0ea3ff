-- The tables. Every one is led by chat_id where it has one, and carries tenant, so that row-level
-- security needs no look-up. Tables are private: functions and views are the contract.

create table pycontext.profile (
    profile text collate "C" not null,
    tenant text collate "C" not null default '',
    encoding text not null default 'o200k_base',
    token_scale numeric not null default 1.0,
    context_window integer not null default 128000,
    response_reserve integer not null default 8192,
    memory_tokens integer not null default 2000,
    head_tokens integer not null default 2000,
    tail_ratio numeric not null default 0.25,
    summary_ratio numeric not null default 0.05,
    trigger_ratio numeric not null default 0.75,
    trigger_tokens integer,
    target_ratio numeric not null default 0.40,
    image_tokens integer not null default 1000,
    strict_roles boolean not null default false,
    compaction_mode text not null default 'auto',
    summarizer_window integer not null default 32000,
    settle_seconds integer not null default 60,
    constraint profile_pk primary key (profile),
    constraint profile_encoding_ck check (encoding in ('o200k_base', 'cl100k_base')),
    constraint profile_scale_ck check (token_scale between 0.5 and 4),
    constraint profile_window_ck check (context_window between 1000 and 100000000),
    constraint profile_sizes_ck check (response_reserve >= 0 and memory_tokens >= 0 and head_tokens >= 0
        and image_tokens between 1 and 100000 and summarizer_window >= 1000 and settle_seconds >= 0
        and (trigger_tokens is null or trigger_tokens > 0)),
    constraint profile_ratios_ck check (tail_ratio between 0.05 and 0.6 and summary_ratio between 0.005 and 0.3
        and target_ratio between 0.1 and 0.9 and trigger_ratio > target_ratio and trigger_ratio <= 1
        and tail_ratio < target_ratio),
    constraint profile_mode_ck check (compaction_mode in ('auto', 'warn', 'off'))
);

insert into pycontext.profile (profile) values ('default');
insert into pycontext.profile (profile, context_window, response_reserve, memory_tokens, head_tokens, summarizer_window)
values ('small-8k', 8192, 1024, 500, 700, 8000);
insert into pycontext.profile (profile, context_window, response_reserve, head_tokens)
values ('long-1m', 1000000, 32000, 4000);
insert into pycontext.profile (profile, context_window, token_scale) values ('claude-200k', 200000, 1.35);

-- A relation of the product that holds its messages; read where it is, never written.
create table pycontext.source (
    source text collate "C" not null,
    tenant text collate "C" not null default '',
    relation text not null,
    is_default boolean not null default false,
    created_at timestamptz not null default now(),
    constraint source_pk primary key (source)
);

-- One row a chat. It is locked by every append, so it also carries the running figures that let a
-- window be planned without walking the chat.
create table pycontext.chat (
    chat_id text collate "C" not null,
    tenant text collate "C" not null default '',
    owner text collate "C",
    profile text collate "C" not null,
    source text collate "C",
    token_scale numeric not null,
    tool_tokens integer not null default 0,
    last_seq bigint not null default 0,
    act_no bigint not null default 0,
    edit_no bigint not null default 0,
    total_tokens bigint not null default 0,
    stub_total bigint not null default 0,
    live_tokens bigint not null default 0,
    excess_tokens bigint not null default 0,
    line_seq bigint,
    line_no smallint,
    reset_seq bigint not null default 0,
    request_seq bigint,
    head_seq bigint,
    head_to bigint,
    head_base bigint not null default 0,
    is_head_open boolean not null default true,
    last_unit bigint not null default 0,
    open_calls jsonb not null default '{}',
    straddles int8multirange not null default '{}',
    prune_unit bigint,
    prune_total bigint,
    prune_stub bigint,
    prune_request bigint,
    metadata jsonb,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint chat_pk primary key (chat_id),
    constraint chat_profile_fk foreign key (profile) references pycontext.profile (profile),
    constraint chat_source_fk foreign key (source) references pycontext.source (source)
) with (fillfactor = 70);

-- The thread. Narrow columns first: they are what a window is planned on; content is read last and
-- only for the rows that are returned. A summary row carries the seq of the message it follows.
create table pycontext.message (
    chat_id text collate "C" not null,
    seq bigint not null,
    line_no smallint not null default 0,
    kind text not null default 'message',
    role text not null,
    unit_seq bigint not null,
    tokens integer not null,
    frozen_tokens integer not null,
    stub_tokens integer not null,
    reasoning_tokens integer not null default 0,
    running_total bigint not null,
    running_stub bigint not null,
    images smallint not null default 0,
    calls smallint not null default 0,
    is_user boolean not null default false,
    is_plain boolean not null default true,
    has_fence boolean not null default false,
    after_user bigint,
    superseded_seq bigint,
    at_act bigint not null,
    gone_act bigint,
    read_budget integer,
    encoding text,
    digest bytea not null,
    tenant text collate "C" not null default '',
    message_id text collate "C" not null,
    tool_call_id text,
    name text,
    created_at timestamptz not null,
    origin text,
    request_seq bigint,
    request_frozen integer,
    head_from bigint,
    head_to bigint,
    head_frozen integer,
    covers_from bigint,
    stub text,
    stub_calls jsonb,
    content jsonb,
    tool_calls jsonb,
    metadata jsonb,
    summary jsonb,
    segment jsonb,
    constraint message_pk primary key (chat_id, seq, line_no),
    constraint message_id_uq unique (chat_id, message_id),
    constraint message_chat_fk foreign key (chat_id) references pycontext.chat (chat_id),
    constraint message_role_ck check (role in ('user', 'assistant', 'tool', 'system', 'developer')),
    constraint message_kind_ck check (kind = case when line_no = 0 then 'message' else 'summary' end),
    constraint message_origin_ck check ((kind = 'summary') = (origin is not null) and origin in ('compaction', 'reset'))
);
create index message_unit_ix on pycontext.message (chat_id, unit_seq, seq, line_no) where gone_act is null;
create index message_gone_ix on pycontext.message (chat_id, unit_seq, seq) where gone_act is not null;
create index message_line_ix on pycontext.message (chat_id, seq, line_no) where line_no > 0;
create index message_uncounted_ix on pycontext.message (chat_id, seq) where encoding is null;

-- System prompts with the act that set them, so that a replay reads the one of its day.
create table pycontext.prompt (
    chat_id text collate "C" not null,
    act_no bigint not null,
    tenant text collate "C" not null default '',
    content text not null,
    tokens integer not null,
    frozen_tokens integer not null,
    encoding text,
    created_at timestamptz not null default now(),
    constraint prompt_pk primary key (chat_id, act_no),
    constraint prompt_chat_fk foreign key (chat_id) references pycontext.chat (chat_id)
);

-- Counts of rows that are not ours (adopted chats) and counts in a second encoding.
create table pycontext.token_count (
    chat_id text collate "C" not null,
    seq bigint not null,
    line_no smallint not null default 0,
    encoding text not null,
    tenant text collate "C" not null default '',
    tokens integer not null,
    constraint token_count_pk primary key (chat_id, seq, line_no, encoding)
);

-- What may have changed earlier bytes of the window, in order.
create table pycontext.act (
    chat_id text collate "C" not null,
    act_no bigint not null,
    tenant text collate "C" not null default '',
    act text not null,
    at_seq bigint not null,
    details jsonb,
    created_at timestamptz not null default now(),
    constraint act_pk primary key (chat_id, act_no),
    constraint act_chat_fk foreign key (chat_id) references pycontext.chat (chat_id)
);

-- Every compaction attempt, without content.
create table pycontext.pass (
    chat_id text collate "C" not null,
    pass_no bigint not null,
    tenant text collate "C" not null default '',
    act_no bigint,
    at_seq bigint not null,
    outcome text not null,
    reason text,
    trigger text,
    from_seq bigint,
    to_seq bigint,
    summary_id text collate "C",
    token_budget integer,
    tokens_before integer,
    tokens_after integer,
    model text,
    calls integer,
    prompt_tokens integer,
    completion_tokens integer,
    seconds numeric,
    lost_values integer,
    limits jsonb,
    created_at timestamptz not null default now(),
    constraint pass_pk primary key (chat_id, pass_no),
    constraint pass_chat_fk foreign key (chat_id) references pycontext.chat (chat_id),
    constraint pass_outcome_ck check (outcome in ('pruned', 'omitted', 'summarized', 'skipped', 'failed'))
);
