-- Nothing is executable by PUBLIC; extras/roles.sql grants what readers and writers need.
revoke execute on all functions in schema pycontext from public;
