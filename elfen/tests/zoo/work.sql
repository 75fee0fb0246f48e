create table t(a integer, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 150000)
insert into t select i * 7919 % 100003, hex(i) from n;
create index by_a on t(a);
select count(*), sum(a), max(b), (select count(*) from t x join t y on x.a = y.a + 1)
from t;
