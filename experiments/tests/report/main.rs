//! Reports as a browser and a spreadsheet meet them: the rendered file is parsed, its pictures are
//! measured, its CSVs read.

mod drawn;
mod extremes;
mod live;
mod page;
mod shim;
mod simulated;
