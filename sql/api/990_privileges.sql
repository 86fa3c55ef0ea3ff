-- Overloads that an earlier version left behind: functions of a name that this install made, which it did not make.
do $$
declare
    v_function record;
begin
    for v_function in
        select p.oid::pg_catalog.regprocedure as signature
        from pg_catalog.pg_proc p
        where p.pronamespace = 'pycontext'::pg_catalog.regnamespace
            and p.xmin <> pg_catalog.pg_current_xact_id()::pg_catalog.xid
            and exists (
                select from pg_catalog.pg_proc q
                where q.pronamespace = p.pronamespace and q.proname = p.proname
                    and q.xmin = pg_catalog.pg_current_xact_id()::pg_catalog.xid)
    loop
        execute pg_catalog.format('drop function %s', v_function.signature);
    end loop;
end
$$;

-- Nothing is executable by PUBLIC; extras/roles.sql grants what readers and writers need.
revoke execute on all functions in schema pycontext from public;

-- The statements of the sources that are registered, as this version writes them.
select pycontext._compile_sources();
