// The service of a JVM that `elfen tailor check` has collect: lines of text, a thread for each
// client. "spin N" spins for N microseconds and answers for how many nanoseconds it was kept from
// that, "collect" collects the whole heap, and a number alone is that much work.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;

public class Held {
    /** Of a loop that looks at the clock, a turn takes less. */
    static final long GAP_NS = 5_000;
    /** Live, so that a collection has something to do. */
    static final long[][] HEAP = new long[300_000][];

    static long spin(long us) {
        long last = System.nanoTime(), until = last + us * 1_000, held = 0;
        while (last < until) {
            long now = System.nanoTime();
            if (now - last >= GAP_NS) {
                held += now - last;
            }
            last = now;
        }
        return held;
    }

    static String answer(String line) {
        if (line.startsWith("spin ")) {
            return String.format("%020d%n", spin(Long.parseLong(line.substring(5))));
        }
        if (line.equals("collect")) {
            System.gc();
        } else {
            spin(Long.parseLong(line));
        }
        return "done\n";
    }

    static void serve(Socket socket) {
        try (Socket client = socket) {
            client.setTcpNoDelay(true);
            InputStreamReader in = new InputStreamReader(client.getInputStream());
            BufferedReader lines = new BufferedReader(in);
            OutputStream out = client.getOutputStream();
            for (String line; (line = lines.readLine()) != null; ) {
                out.write(answer(line).getBytes());
            }
        } catch (Exception gone) {
            // Whoever asks no more has left.
        }
    }

    public static void main(String[] none) throws Exception {
        for (int at = 0; at < HEAP.length; at++) {
            HEAP[at] = new long[4];
        }
        // Compiled before anybody asks.
        spin(200_000);
        Thread ends = new Thread(() -> {
            try {
                while (System.in.read() >= 0) { }
            } catch (Exception gone) {
                // As well an end.
            }
            System.exit(0);
        });
        ends.setDaemon(true);
        ends.start();
        ServerSocket listener = new ServerSocket(0, 50, InetAddress.getByName("127.0.0.1"));
        System.out.println(listener.getLocalPort());
        while (true) {
            Socket client = listener.accept();
            Thread serves = new Thread(() -> serve(client));
            serves.setDaemon(true);
            serves.start();
        }
    }
}
