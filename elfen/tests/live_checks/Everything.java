import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/**
 * Uses many features of a virtual machine that concern compiled code, and prints the results:
 * methods that never return, long and counted loops, collections and garbage collection;
 * exceptions by faults, stack overflow, assumptions that a later class breaks;
 * several class loaders, threads, and locks.
 */
public class Everything {
    static long mix(long x) {
        x ^= x >>> 17;
        return x * 6364136223846793005L + 1442695040888963407L;
    }

    /** One activation of a method for all rounds. */
    static long whileLoop(long rounds) {
        long x = 1;
        while (rounds-- > 0) {
            x = mix(x);
        }
        return x;
    }

    static double matrices(int n, int rounds) {
        double[][] a = new double[n][n], b = new double[n][n], c = new double[n][n];
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < n; j++) {
                a[i][j] = i - j;
                b[i][j] = i + 2 * j;
            }
        }
        for (int round = 0; round < rounds; round++) {
            for (int i = 0; i < n; i++) {
                for (int j = 0; j < n; j++) {
                    double sum = 0;
                    for (int k = 0; k < n; k++) {
                        sum += a[i][k] * b[k][j];
                    }
                    c[i][j] += sum % 1000;
                }
            }
        }
        return c[n / 2][n / 3] + c[1][n - 1];
    }

    static long collections(int rounds) {
        Map<Integer, List<Integer>> lists = new HashMap<>();
        Map<String, Integer> tree = new TreeMap<>();
        long seed = 3, sum = 0;
        for (int i = 0; i < rounds; i++) {
            seed = mix(seed);
            int key = (int) (seed >>> 48) & 1023;
            List<Integer> list = lists.computeIfAbsent(key, none -> new ArrayList<>());
            list.add(i);
            if (list.size() > 100) {
                sum += lists.remove(key).stream().mapToLong(Integer::longValue).sum();
            }
            tree.merge("k" + key, 1, Integer::sum);
        }
        return sum + tree.hashCode() + lists.size();
    }

    /** Null pointers, divisions by zero and bounds. Compiled code detects each in its own way. */
    static long exceptions(int rounds) {
        long caught = 0;
        int[][] rows = new int[64][];
        for (int i = 0; i < 64; i += 2) {
            rows[i] = new int[16];
        }
        for (int i = 0; i < rounds; i++) {
            try {
                int[] row = rows[i % 64];
                row[i % 17] += 10 / (i % 13);
                caught += row[i % 16];
            } catch (NullPointerException none) {
                caught += 1;
            } catch (ArithmeticException zero) {
                caught += 1000;
            } catch (ArrayIndexOutOfBoundsException outside) {
                caught += 1_000_000;
            }
        }
        return caught;
    }

    static int depth(int n, long[] sum) {
        sum[0] = mix(sum[0] + n);
        return n == 0 ? 0 : 1 + depth(n - 1, sum);
    }

    static long stack(int rounds) {
        long found = 0;
        long[] sum = {1};
        for (int i = 0; i < rounds; i++) {
            found += depth(200, sum);
            if (i % 1000 == 0) {
                try {
                    depth(Integer.MAX_VALUE, new long[1]);
                } catch (StackOverflowError end) {
                    found += 7;
                }
            }
        }
        return found + sum[0];
    }

    interface Shape {
        long area(long x);
    }

    static class Square implements Shape {
        public long area(long x) {
            return x * x;
        }
    }

    static class Late implements Shape {
        public long area(long x) {
            return mix(x) & 0xff;
        }
    }

    /** While one class of shapes exists, the call is inlined. Then another class is loaded. */
    static long assumptions(int rounds) {
        long sum = 0;
        Shape shape = new Square();
        for (int i = 0; i < rounds; i++) {
            if (i == rounds / 2) {
                shape = new Late();
            }
            sum += shape.area(i);
        }
        return sum;
    }

    /** Each class loader has its own class of this name. */
    public static class Loaded {
        public static long run(long rounds) {
            long x = 5;
            for (long i = 0; i < rounds; i++) {
                x = (x << 7 ^ x >>> 3) + i;
            }
            return x;
        }
    }

    static class Loader extends ClassLoader {
        Class<?> own(Class<?> other) throws Exception {
            String file = "/" + other.getName().replace('.', '/') + ".class";
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            try (InputStream in = Everything.class.getResourceAsStream(file)) {
                in.transferTo(bytes);
            }
            return defineClass(other.getName(), bytes.toByteArray(), 0, bytes.size());
        }
    }

    static long loaders(int count, long rounds) throws Exception {
        long sum = 0;
        for (int i = 0; i < count; i++) {
            Method run = new Loader().own(Loaded.class).getMethod("run", long.class);
            sum += (Long) run.invoke(null, rounds + i);
        }
        return sum;
    }

    static long threads(int count, int rounds) throws Exception {
        long[] sums = new long[count];
        long[] locked = new long[1];
        Thread[] all = new Thread[count];
        for (int t = 0; t < count; t++) {
            int own = t;
            all[t] = new Thread(() -> {
                long x = own;
                for (int i = 0; i < rounds; i++) {
                    x = mix(x);
                    if ((i & 4095) == 0) {
                        synchronized (locked) {
                            locked[0]++;
                        }
                    }
                }
                sums[own] = x;
            });
            all[t].start();
        }
        long sum = 0;
        for (int t = 0; t < count; t++) {
            all[t].join();
            sum ^= sums[t];
        }
        return sum + locked[0];
    }

    static String part(String name) throws Exception {
        switch (name) {
            case "while":
                return "" + whileLoop(30_000_000L);
            case "matrices":
                return "" + matrices(160, 10);
            case "collections":
                return "" + collections(300_000);
            case "exceptions":
                return "" + exceptions(300_000);
            case "stack":
                return "" + stack(8_000);
            case "assumptions":
                return "" + assumptions(20_000_000);
            case "loaders":
                return "" + loaders(6, 3_000_000L);
            case "threads":
                return "" + threads(3, 6_000_000);
            default:
                throw new IllegalArgumentException(name);
        }
    }

    static final String[] ALL = {
        "while", "matrices", "collections", "exceptions", "stack", "assumptions", "loaders", "threads",
    };

    /** Arguments: the number of rounds, and the name of a part. Without a name, all parts run. */
    public static void main(String[] arguments) throws Exception {
        int times = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 1;
        for (int i = 0; i < times; i++) {
            for (String name : arguments.length > 1 ? new String[] {arguments[1]} : ALL) {
                System.out.println(name + " " + part(name));
            }
        }
        System.exit(7);
    }
}
