#include <stdexcept>
#include <iostream>
#include <vector>
#include <string>
struct D{ int&r; ~D(){ r++; } };
int deep(int n,int&r){ D d{r}; if(n==0) throw std::runtime_error("x"); return deep(n-1,r)+1; }
int main(){ int r=0,c=0; for(int i=0;i<2000;i++){ try{ deep(i%20,r);}catch(std::exception&e){c++;} } std::vector<std::string> v; for(int i=0;i<1000;i++) v.push_back(std::to_string(i*i)); std::cout<<r<<" "<<c<<" "<<v[999]<<std::endl; try { throw 5; } catch(int x){ return x; } }
