// Generates articles in an artificial language, and queries for them. Equal seeds generate equal
// texts. Word frequencies follow Zipf's law. Most articles are short and a few are long.

package elfen;

import java.util.Random;

final class Corpus {
    private static final int WORDS = 50_000;
    private static final int SHORTEST = 40;
    private static final int WIDEST = 1_000;
    private final Random random;

    Corpus(long seed) {
        random = new Random(seed);
    }

    /** The nth most frequent word is drawn with a probability proportional to 1/n. */
    private String word() {
        return "w" + (int) Math.exp(random.nextDouble() * Math.log(WORDS));
    }

    private String words(int count) {
        StringBuilder text = new StringBuilder();
        for (int at = 0; at < count; at++) {
            text.append(at == 0 ? "" : " ").append(word());
        }
        return text.toString();
    }

    String article() {
        double width = random.nextDouble();
        return words(SHORTEST + (int) (width * width * WIDEST));
    }

    String question() {
        return words(1 + random.nextInt(3));
    }
}
