// Publishes the requests of a Java service, for `elfen tailor` and for batches that borrow. The
// native methods are in libelfen_lucene.so. Without this library, the methods do nothing.

package elfen;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;

final class Marks {
    private static final int NAME_BYTES = 32;
    private final boolean on;

    private Marks(boolean on) {
        this.on = on;
    }

    static Marks none() {
        return new Marks(false);
    }

    /** Opens the page of a service with this number of lanes. */
    static Marks open(String library, String name, int lanes) {
        System.load(library);
        byte[] bytes = name.getBytes(StandardCharsets.UTF_8);
        if (bytes.length > NAME_BYTES) {
            throw new IllegalArgumentException("the name is longer than " + NAME_BYTES + " bytes");
        }
        ByteBuffer words = ByteBuffer.allocate(NAME_BYTES).order(ByteOrder.LITTLE_ENDIAN);
        words.put(bytes).rewind();
        int opened =
            open(words.getLong(), words.getLong(), words.getLong(), words.getLong(), lanes);
        if (opened != 0) {
            throw new IllegalStateException("no page for the service " + name);
        }
        return new Marks(true);
    }

    /**
     * The calling thread serves this lane from now on. A thread that has already claimed the lane
     * keeps it.
     */
    void serve(int lane, int cpu) {
        if (on && claim(lane, cpu) != 0) {
            throw new IllegalStateException("lane " + lane + " is served by another process");
        }
    }

    void queue(int lane, int count) {
        if (on) {
            waiting(lane, count);
        }
    }

    void begins(long request, long arrivedNs, long kind) {
        if (on) {
            begin(request, arrivedNs, kind);
        }
    }

    void goesOn(int to) {
        if (on) {
            stage(to);
        }
    }

    void ends() {
        if (on) {
            end();
        }
    }

    private static native int open(long a, long b, long c, long d, int lanes);

    private static native int claim(int lane, int cpu);

    private static native void waiting(int lane, int count);

    private static native void begin(long request, long arrivedNs, long kind);

    private static native void stage(int stage);

    private static native void end();
}
