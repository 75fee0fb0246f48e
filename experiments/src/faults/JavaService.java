// A JVM service for `elfen lab check`, with a thread for each client. A request is a line of text:
// - "spin N" spins for N microseconds. The answer is the time that the thread did not run, in
//   nanoseconds.
// - "collect" collects the whole heap.
// - "load N" loads N classes for the first time. The answer is the CPU time, in nanoseconds.
// - "N" spins for N microseconds.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.URI;
import java.nio.file.FileSystems;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.stream.Stream;

public class JavaService {
    /** A longer iteration of the loop that reads the clock means that the thread did not run. */
    static final long GAP_NS = 5_000;
    /** Live data, so that a garbage collection has work. */
    static final long[][] HEAP = new long[300_000][];

    /** A package of the JDK whose classes are not in the archive of preloaded classes. */
    static final String UNUSED = "/modules/java.xml/com/sun/org/apache/xerces/internal/impl";
    static final ArrayDeque<String> CLASSES = new ArrayDeque<>();
    static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    /** Lists the names of classes and loads one of them. Later requests then only load classes. */
    static void prepare() throws Exception {
        Path root = FileSystems.getFileSystem(URI.create("jrt:/")).getPath("/modules/java.xml");
        try (Stream<Path> all = Files.walk(root.getFileSystem().getPath(UNUSED))) {
            all.map(file -> root.relativize(file).toString())
                .filter(name -> name.endsWith(".class"))
                .forEach(name -> CLASSES.add(name.replace(".class", "").replace('/', '.')));
        }
        answer("load 1");
    }

    static synchronized long load(int count) throws Exception {
        long before = THREADS.getCurrentThreadCpuTime();
        for (int at = 0; at < count; at++) {
            Class.forName(CLASSES.remove(), false, null);
        }
        return THREADS.getCurrentThreadCpuTime() - before;
    }

    static String number(long number) {
        String text = Long.toString(number);
        return "0".repeat(20 - text.length()) + text + "\n";
    }

    static long spin(long us) {
        long last = System.nanoTime(), until = last + us * 1_000, kept = 0;
        while (last < until) {
            long now = System.nanoTime();
            if (now - last >= GAP_NS) {
                kept += now - last;
            }
            last = now;
        }
        return kept;
    }

    static String answer(String line) throws Exception {
        if (line.startsWith("spin ")) {
            return number(spin(Long.parseLong(line.substring(5))));
        }
        if (line.startsWith("load ")) {
            return number(load(Integer.parseInt(line.substring(5))));
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
            // The client has closed its connection.
        }
    }

    public static void main(String[] how) throws Exception {
        for (int at = 0; at < HEAP.length; at++) {
            HEAP[at] = new long[4];
        }
        if (how.length > 0) {
            prepare();
        } else {
            // The JIT compiles `spin` before the first request.
            spin(200_000);
        }
        Thread ends = new Thread(() -> {
            try {
                while (System.in.read() >= 0) { }
            } catch (Exception gone) {
                // An error ends the service, too.
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
