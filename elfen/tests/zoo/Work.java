import java.util.*;
import java.util.stream.*;

public class Work {
    static long hash(int i) {
        return Arrays.hashCode(new int[] {i, i * 31}) % 1009;
    }

    public static void main(String[] a) {
        int times = a.length > 0 ? Integer.parseInt(a[0]) : 1;
        long sum = IntStream.range(0, 400000 * times).parallel().mapToLong(Work::hash).sum();
        Map<Integer, Integer> counts = new TreeMap<>();
        Random random = new Random(7);
        for (int i = 0; i < 300000 * times; i++) {
            counts.merge(random.nextInt(5000), 1, Integer::sum);
        }
        System.out.println(sum + " " + counts.hashCode());
    }
}
