-- Removes pycontext from this database, with every chat in it. There is no way back.
-- Roles of extras/roles.sql belong to the cluster and stay; drop them yourself when no database uses them:
--   drop role pycontext_reader, pycontext_writer, pycontext_admin;

do $$
begin
    perform pg_catalog.pg_advisory_xact_lock(7234015113000001);
    if exists (select from pg_catalog.pg_namespace n where n.nspname = 'pycontext') then
        drop schema pycontext cascade;
    end if;
end
$$;
