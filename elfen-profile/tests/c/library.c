/* One of two libraries whose code differs in a constant. */
long value(long x)
{
    for (int i = 0; i < 50; i++)
        x = x * 3 + (x & 1 ? VALUE : 7);
    return x * 10 + VALUE;
}
