-- Whether a source that is registered again reads the same rows: what was derived of others is not kept.
alter table pycontext.source add column definition text;
