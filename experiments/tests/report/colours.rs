//! Goal: series can be told apart by everybody, in light, in dark and on paper. Method: the colours
//! are those of the page's style; contrasts are WCAG's; distances are Oklab's, with full colour
//! vision and as protanopes, deuteranopes and tritanopes see (Machado, Oliveira and Fernandes 2009,
//! severity 1), between all that meet in a figure.

use experiments::report::figure::Style;

const CSS: &str = include_str!("../../../elfen-console/src/page.css");

type Rgb = [f64; 3];
type Matrix = [[f64; 3]; 3];

/// Scenarios that are drawn in one figure: without Elfen, and under its policies.
const TOGETHER: [[&str; 6]; 2] = [
    ["ink", "red", "orange", "green", "grey", "blue"],
    ["ink", "blue", "aqua", "ochre", "violet", "pink"],
];

const SIGHTS: [Matrix; 4] = [
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
];

fn times(matrix: &Matrix, of: Rgb) -> Rgb {
    matrix.map(|row| row.iter().zip(of).map(|(a, b)| a * b).sum())
}

fn oklab(linear: Rgb) -> Rgb {
    let to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ];
    let to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ];
    times(&to_lab, times(&to_cones, linear.map(|part| part.max(0.0))).map(f64::cbrt))
}

fn distance(one: Rgb, other: Rgb, sight: &Matrix) -> f64 {
    let [one, other] = [one, other].map(|colour| oklab(times(sight, colour)));
    let squares = one.iter().zip(other).map(|(a, b)| (a - b) * (a - b));
    squares.sum::<f64>().sqrt()
}

fn contrast(one: Rgb, other: Rgb) -> f64 {
    let luminance = |[r, g, b]: Rgb| 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    let (one, other) = (luminance(one), luminance(other));
    one.max(other) / one.min(other)
}

/// The colour of a custom property, as linear light.
#[track_caller]
fn colour(css: &str, name: &str) -> Rgb {
    let (_, rest) = css.split_once(&format!("--{name}: #")).unwrap_or_else(|| panic!("no {name}"));
    [0, 2, 4].map(|at| {
        let part = u8::from_str_radix(&rest[at..at + 2], 16).expect("hexadecimal");
        let part = f64::from(part) / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    })
}

#[test]
fn colours_differ_for_everybody() {
    let themes: Vec<&str> = CSS.split("@media").filter(|part| part.contains("--c-ink")).collect();
    assert_eq!(themes.len(), 3, "light, dark and print");
    for theme in themes {
        let paper = colour(theme, "raised");
        for text in ["ink", "soft", "link"] {
            assert!(contrast(colour(theme, text), paper) > 4.5, "{text} {theme}");
        }
        for names in TOGETHER {
            for (index, one) in names.iter().enumerate() {
                let here = colour(theme, &format!("c-{one}"));
                assert!(contrast(here, paper) >= 3.0, "{one}: {}", contrast(here, paper));
                for other in &names[index + 1..] {
                    let there = colour(theme, &format!("c-{other}"));
                    let least =
                        SIGHTS.iter().map(|sight| distance(here, there, sight)).reduce(f64::min);
                    assert!(least > Some(0.09), "{one} and {other}: {least:?} {theme}");
                }
            }
        }
    }
}

/// Goal: a picture has the colours of the light theme, and without colour no two styles share a
/// dash. Method: all pairs.
#[test]
fn dashes_differ() {
    for (index, one) in Style::ALL.into_iter().enumerate() {
        let property = format!("--c-{}: #{:06x};", one.name, one.rgb);
        let light = CSS.split("@media").next().expect("a first theme");
        assert!(light.contains(&property), "{property}");
        for other in &Style::ALL[index + 1..] {
            assert!(one.dash != other.dash, "{one:?} {other:?}");
        }
    }
}
