// A search service on Lucene behind the JDK's own HTTP server: GET /search?q=some+words.
//
// The thesis tested Tailor on such a service. Nothing in it is tuned. Options of the JVM decide
// whether answers wait for acknowledgements, when memory is touched, and which garbage collector
// runs. The workers are threads that share one queue. Each worker publishes what it does with a
// request (Marks.java).

package elfen;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.lucene.analysis.core.WhitespaceAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.TextField;
import org.apache.lucene.index.DirectoryReader;
import org.apache.lucene.index.IndexWriter;
import org.apache.lucene.index.IndexWriterConfig;
import org.apache.lucene.index.Term;
import org.apache.lucene.search.BooleanClause;
import org.apache.lucene.search.BooleanQuery;
import org.apache.lucene.search.IndexSearcher;
import org.apache.lucene.search.ScoreDoc;
import org.apache.lucene.search.TermQuery;
import org.apache.lucene.store.ByteBuffersDirectory;

public final class Search {
    private static final String USAGE =
        "Search serve ARTICLES WORKERS [LIBRARY SERVICE] | Search questions COUNT";
    private static final int SEED = 7;
    /** -Delfen.port=N sets the port. The default is any free port. */
    private static final int PORT = Integer.getInteger("elfen.port", 0);
    private static final int HITS = 10;
    /**
     * -Delfen.told=true: the service reads commands from standard input. This is off by default,
     * because the kernel stops a background process of a shell that reads from its terminal.
     */
    private static final boolean TOLD = Boolean.getBoolean("elfen.told");
    /** This line on standard input starts a garbage collection of the whole heap. */
    private static final String COLLECT = "collect";
    /** Numbers of the stages in the marks. Stage 0 reads the query. */
    private static final int SEARCHES = 1;
    private static final int ANSWERS = 2;

    private final IndexSearcher searcher;
    private final Marks marks;
    private final LinkedBlockingQueue<Task> waiting = new LinkedBlockingQueue<>();
    private final AtomicLong requests = new AtomicLong();

    private record Task(Runnable work, long arrivedNs) {}

    private static final ThreadLocal<Long> ARRIVED = new ThreadLocal<>();

    private Search(IndexSearcher searcher, Marks marks) {
        this.searcher = searcher;
        this.marks = marks;
    }

    public static void main(String[] arguments) throws IOException {
        if (arguments.length == 2 && arguments[0].equals("questions")) {
            Corpus corpus = new Corpus(SEED + 1);
            for (int at = Integer.parseInt(arguments[1]); at > 0; at--) {
                System.out.println(corpus.question());
            }
        } else if (arguments.length >= 3 && arguments[0].equals("serve")) {
            int workers = Integer.parseInt(arguments[2]);
            Marks marks =
                arguments.length == 5
                    ? Marks.open(arguments[3], arguments[4], workers)
                    : Marks.none();
            new Search(index(Integer.parseInt(arguments[1])), marks).serve(workers);
        } else {
            System.err.println(USAGE);
            System.exit(2);
        }
    }

    private static IndexSearcher index(int articles) throws IOException {
        ByteBuffersDirectory memory = new ByteBuffersDirectory();
        Corpus corpus = new Corpus(SEED);
        try (IndexWriter writer =
            new IndexWriter(memory, new IndexWriterConfig(new WhitespaceAnalyzer()))) {
            for (int at = 0; at < articles; at++) {
                Document document = new Document();
                document.add(new TextField("body", corpus.article(), Field.Store.NO));
                writer.addDocument(document);
            }
            writer.forceMerge(1);
        }
        return new IndexSearcher(DirectoryReader.open(memory));
    }

    private void serve(int workers) throws IOException {
        InetSocketAddress here = new InetSocketAddress(InetAddress.getLoopbackAddress(), PORT);
        HttpServer server = HttpServer.create(here, 0);
        server.createContext("/search", this::answer);
        server.setExecutor(
            work -> {
                waiting.add(new Task(work, System.nanoTime()));
                marks.queue(0, waiting.size());
            });
        for (int lane = 0; lane < workers; lane++) {
            int own = lane;
            new Thread(() -> work(own), "worker-" + lane).start();
        }
        server.start();
        if (TOLD) {
            Thread told = new Thread(Search::listen, "told");
            told.setDaemon(true);
            told.start();
        }
        System.out.println(server.getAddress().getPort());
        System.out.flush();
    }

    /**
     * Reads standard input. The parent process can request a garbage collection, in addition to
     * those of the JVM.
     */
    private static void listen() {
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(System.in))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                if (line.equals(COLLECT)) {
                    System.gc();
                }
            }
        } catch (IOException end) {
            return;
        }
    }

    private void work(int lane) {
        marks.serve(lane, lane);
        while (true) {
            try {
                Task task = waiting.take();
                marks.queue(0, waiting.size());
                ARRIVED.set(task.arrivedNs);
                task.work.run();
            } catch (InterruptedException end) {
                return;
            }
        }
    }

    private void answer(HttpExchange exchange) throws IOException {
        String query = exchange.getRequestURI().getQuery();
        String words = query != null && query.startsWith("q=") ? query.substring(2) : "";
        marks.begins(requests.incrementAndGet(), ARRIVED.get(), 1 + words.split("[ +]").length);
        try {
            marks.goesOn(SEARCHES);
            byte[] found = search(words).getBytes(StandardCharsets.UTF_8);
            marks.goesOn(ANSWERS);
            exchange.sendResponseHeaders(200, found.length);
            exchange.getResponseBody().write(found);
            exchange.close();
        } finally {
            marks.ends();
        }
    }

    private String search(String words) throws IOException {
        BooleanQuery.Builder query = new BooleanQuery.Builder();
        for (String word : words.split("[ +]")) {
            query.add(new TermQuery(new Term("body", word)), BooleanClause.Occur.SHOULD);
        }
        StringBuilder text = new StringBuilder();
        for (ScoreDoc hit : searcher.search(query.build(), HITS).scoreDocs) {
            text.append(hit.doc).append(' ').append(hit.score).append('\n');
        }
        return text.toString();
    }
}
