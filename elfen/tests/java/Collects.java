// An HTTP server with many live objects, whose JVM sometimes collects garbage. Its first line of
// output is its port. The caller chooses the collector and the log of collections.

import com.sun.net.httpserver.HttpServer;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;

final class Collects {
    static List<int[]> lives;

    public static void main(String[] arguments) throws Exception {
        List<int[]> all = new ArrayList<>();
        for (int at = 0; at < 1_000_000; at++) {
            all.add(new int[] {at});
        }
        lives = all;
        InetSocketAddress here = new InetSocketAddress(InetAddress.getLoopbackAddress(), 0);
        HttpServer server = HttpServer.create(here, 0);
        server.createContext("/", exchange -> {
            byte[] answer = "hello".getBytes();
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
        });
        server.start();
        System.out.println(server.getAddress().getPort());
        while (true) {
            Thread.sleep(300);
            System.gc();
        }
    }
}
