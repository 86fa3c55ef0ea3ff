-- Durable facts: what a chat's user stated or its agent decided to remember. One row a statement, so that taking a
-- message back takes back what came from it and nothing else; reads show each fact once, the newest telling.

create table pycontext.fact (
    chat_id text collate "C" not null,
    fact_id text collate "C" not null,
    tenant text collate "C" not null default '',
    owner text collate "C",
    seq bigint not null,
    role text not null,
    source text not null,
    kind text not null default 'fact',
    subject text,
    content text,
    words tsvector,
    digest bytea not null,
    stated_at timestamptz not null,
    created_at timestamptz not null default now(),
    gone_at timestamptz,
    gone_by text,
    gone_seq bigint,
    constraint fact_pk primary key (chat_id, fact_id),
    constraint fact_chat_fk foreign key (chat_id) references pycontext.chat (chat_id),
    constraint fact_source_ck check (source in ('flush', 'remember')),
    constraint fact_gone_ck check ((gone_at is null) = (gone_by is null) and gone_by in ('forgotten', 'rewound')),
    constraint fact_content_ck check ((content is null) = (gone_by is not distinct from 'forgotten'))
);
create index fact_seq_ix on pycontext.fact (chat_id, seq);
create index fact_owner_ix on pycontext.fact (tenant, owner, stated_at) where owner is not null;
create index chat_owner_ix on pycontext.chat (tenant, owner, chat_id) where owner is not null;

alter table pycontext.chat
    add column flushed_seq bigint,
    add column flush_error text,
    add column flush_failed_at timestamptz;

alter table pycontext.profile
    add column flush_mode text not null default 'required',
    add constraint profile_flush_ck check (flush_mode in ('required', 'optional', 'off'));

comment on table pycontext.fact is
    'Durable facts, one row a statement. Read them through recall and memory_page, which show each once, the newest telling.';
comment on column pycontext.fact.chat_id is 'The chat it was stated in.';
comment on column pycontext.fact.fact_id is 'Name of the fact in its chat, derived from the statement; what forget takes.';
comment on column pycontext.fact.tenant is 'The chat''s tenant.';
comment on column pycontext.fact.owner is 'The chat''s owner: all his chats recall it; null = its own chat alone does.';
comment on column pycontext.fact.seq is
    'Message it cites; for remember the newest message at that time, 0 = there was none.';
comment on column pycontext.fact.role is 'Who said it: the role of the cited message, or agent for remember.';
comment on column pycontext.fact.source is 'flush: taken from messages before they were summarized; remember: kept on purpose.';
comment on column pycontext.fact.kind is 'What sort of fact, in a word of the extractor''s: fact, preference, identity, …';
comment on column pycontext.fact.subject is
    'What it is about, such as user.name: of two facts about one subject the newer holds; null = contradicts nothing.';
comment on column pycontext.fact.content is 'The fact, masked; null where it was forgotten.';
comment on column pycontext.fact.words is 'What recall looks up, of subject and content.';
comment on column pycontext.fact.digest is 'Of the content in lower case with single spaces: the same fact has the same.';
comment on column pycontext.fact.stated_at is
    'When it was stated: the cited message''s time, never before that of an older statement on the subject in its chat.';
comment on column pycontext.fact.created_at is 'When the row was made.';
comment on column pycontext.fact.gone_at is 'When it left recall; null = live.';
comment on column pycontext.fact.gone_by is 'forgotten: on request, the content is erased; rewound: its message was set aside.';
comment on column pycontext.fact.gone_seq is
    'The chat''s newest message when it was forgotten: a flush of messages up to it does not bring the fact back.';
comment on column pycontext.chat.flushed_seq is
    'Facts of messages up to this seq have been taken ("flushed through"); null = of none.';
comment on column pycontext.chat.flush_error is 'Why the last flush failed; null = it did not.';
comment on column pycontext.chat.flush_failed_at is 'When the last flush failed; null = it did not.';
comment on column pycontext.profile.flush_mode is
    'required: no summary is written where the flush of its range failed; optional: it is all the same; off: no flush.';
