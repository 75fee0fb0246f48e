// Articles of a made-up language and questions to them, the same for the same seed: words by
// Zipf's law, most articles short and a few long.

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

    /** The nth most frequent word is asked for as often as 1/n says. */
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
