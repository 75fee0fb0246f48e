/* Queries for `elfen lab bench fdo` of SQLite, compiled with its sqlite3.c: queries ROUNDS */
#include "sqlite3.h"
#include <stdio.h>
#include <stdlib.h>

static const char QUERIES[] =
    "drop table if exists t; create table t(a, b);"
    "with c(x) as (select 1 union all select x + 1 from c limit 30000)"
    " insert into t select x * 7919 % 30011, 'k' || x from c;"
    "create index i on t(a);"
    "select count(*), sum(length(b)) from t where a between 100 and 20000;"
    "select b, count(*) from t join (select a as aa from t where a < 3000) on a = aa"
    " group by b order by 2 desc, 1 limit 3;"
    "update t set b = b || 'z' where a % 3 = 0;"
    "select sum(length(b)) from t where b like '%9z';";

static int print_row(void *unused, int columns, char **values, char **names)
{
    for (int i = 0; i < columns; i++)
        printf("%s|", values[i] ? values[i] : "");
    puts("");
    return 0;
}

int main(int count, char **words)
{
    sqlite3 *db;
    sqlite3_open(":memory:", &db);
    for (int round = count > 1 ? atoi(words[1]) : 1; round > 0; round--)
        if (sqlite3_exec(db, QUERIES, print_row, 0, 0)) {
            fprintf(stderr, "%s\n", sqlite3_errmsg(db));
            return 1;
        }
    return 0;
}
